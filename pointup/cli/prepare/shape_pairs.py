"""`pointup prepare meshes`, `clouds`, `h5` and `default`: make pair datasets of shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pointup.cli.input_files import Inputs, find_inputs, name_inputs
from pointup.cli.prepare.new_dataset import NewDataset, chosen, parse_range
from pointup.cli.prepare.survey_pairs import paired_files
from pointup.errors import ConfigError, FileError
from pointup.option_help import optional
from pointup.progress import tracked
from pointup.terminal import note

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.geometry.surfaces import Surface


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """Make pairs from meshes: source and target are independent samplings of the surface."""

    inputs: Inputs
    """Meshes (OFF, OBJ, STL, PLY), or folders of meshes. Each mesh is scaled to a furthest distance
    of 1 from its centre. Targets are Poisson-disk samplings with normals."""
    num_source: int = 2048
    """Number of points of a source."""
    ratio: float = 4.0
    """Target points for each source point."""
    pattern: Literal["mixed", "poisson", "random", "scanline"] = "mixed"
    """Pattern of the sources: poisson (evenly spaced), random, scanline (parallel lines), or mixed
    (all of them in turn)."""
    samples_per_mesh: int = 4
    """Samplings of each training mesh. Validation meshes get one sampling of each pattern."""
    samples_for: Annotated[tuple[str, ...], optional("GLOB=N ...")] = ()
    """Number of samplings for training meshes whose names match, as in 'cad_*=1'; 0 leaves them
    out."""
    patches: int = 0
    """Number of patches to cut from each sampling; 0 keeps the whole shape."""
    patch_size: int = 256
    """Number of source points of a patch."""
    noise: Annotated[str | None, optional("SHARE")] = None
    """Standard deviation of Gaussian noise on the sources, as a share of the mesh's furthest
    distance from its centre: a number, or LOW:HIGH to draw from for each sample, as in 0:0.02."""
    validation_meshes: Annotated[tuple[Path, ...], optional("PATH ...")] = ()
    """Meshes for validation; all others are for training. Validation pairs also store the surface
    and a second sampling of it."""
    dataset: NewDataset

    def run(self) -> int:
        import numpy as np

        from pointup.datasets.meshes import Sampling, mesh_file_pairs
        from pointup.datasets.survey_tiles import hold_out
        from pointup.io.files import mesh_extensions

        sampling = Sampling(
            num_source=self.num_source,
            ratio=self.ratio,
            pattern=self.pattern,
            num_patches=self.patches,
            patch_size=self.patch_size,
            noise=parse_range("--noise", self.noise, 0, 1, "0:0.02") if self.noise else (0.0, 0.0),
        )
        inputs = _one_of_each(find_inputs(self.inputs, mesh_extensions))
        held_out: list[Path] = []
        if self.validation_meshes:
            held_out = _one_of_each(find_inputs(self.validation_meshes, mesh_extensions))
        # Named together, so that a training and a validation mesh never have the same name.
        given = {_mesh_of(path) for path in inputs}
        meshes = name_inputs([*inputs, *(p for p in held_out if _mesh_of(p) not in given)])
        shapes = {name: _mesh_of(path) for name, path in meshes.items()}
        name_of = {mesh: name for name, mesh in shapes.items()}
        validation = {name_of[_mesh_of(path)]: path for path in held_out}
        num_samples = {n: self._samples_of(n) for n in meshes if n not in validation}
        for rule in self.samples_for:
            if not any(fnmatch(name, rule.rpartition("=")[0]) for name in num_samples):
                note(f"--samples-for {rule}: no training mesh has such a name")
        train = {name: meshes[name] for name, number in num_samples.items() if number}
        if self.dataset.validation and not self.validation_meshes:
            numbers = np.column_stack([np.arange(len(train)), np.zeros(len(train), np.int64)])
            (held,) = hold_out([numbers], self.dataset.validation, self.dataset.seed, block=1)
            names = np.array(sorted(train))[held]
            validation = {name: train.pop(name) for name in names.tolist()}
        surfaces: dict[str, Surface] = {}
        names = ("inputs", "pattern", "num_source", "ratio", "samples_per_mesh", "samples_for")
        info = {"command": "prepare meshes", **chosen(self, *names)}
        if self.validation_meshes:
            info["validation"] = self.validation_meshes
        info |= chosen(self, *("patches", "patch_size") * bool(self.patches))
        info |= chosen(self, *("noise",) * bool(self.noise))

        with self.dataset.making() as making:
            seed = self.dataset.seed

            def pairs(is_validation: bool, title: str) -> Iterator[Pair]:
                meshes = validation if is_validation else train
                numbers = num_samples
                if is_validation:
                    numbers = dict.fromkeys(validation, sampling.num_patterns)
                calls = [
                    partial(
                        mesh_file_pairs, path, name, sampling, numbers[name], is_validation, seed
                    )
                    for name, path in meshes.items()
                ]
                for of_mesh, surface in making.each(calls, len(calls), title):
                    if is_validation:
                        surfaces[of_mesh[0].surface] = surface
                    yield from of_mesh

            splits = pairs(False, "training meshes"), pairs(True, "validation meshes")
            return making.write(*splits, info, surfaces, shapes)

    def _samples_of(self, name: str) -> int:
        number = self.samples_per_mesh
        for rule in self.samples_for:
            glob, _, value = rule.rpartition("=")
            if not glob or not value.isdecimal():
                raise ConfigError(f"--samples-for {rule}: must be GLOB=N, as in 'cad_*=1'")
            number = int(value) if fnmatch(name, glob) else number
        return number


def _mesh_of(path: Path) -> str:
    """The path of a mesh without its extension: chair.off and chair.obj are one mesh."""
    return str(path.resolve().with_suffix(""))


def _one_of_each(paths: list[Path]) -> list[Path]:
    """The first file of each mesh; a note names a mesh that has several."""
    meshes: dict[str, Path] = {}
    for path in paths:
        meshes.setdefault(_mesh_of(path), path)
    if len(meshes) < len(paths):
        twice = next(path for path in paths if meshes[_mesh_of(path)] != path)
        note(
            f"{len(paths) - len(meshes)} files are of a mesh that another file is of, too, such as "
            f"{meshes[_mesh_of(twice)]} and {twice.name}: one file of each is used"
        )
    return list(meshes.values())


@dataclass(frozen=True, kw_only=True)
class Clouds:
    """Make pairs of whole clouds, such as scans of objects: a sparse and a dense file of each.

    They are not cut into tiles, and any side may be up.
    """

    source: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Sparse clouds: files, or folders of files."""
    target: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Dense clouds: a file for each of --source in the same coordinates, with its name whatever the
    extension; files in folders by their paths in them."""
    by_order: bool = False
    """Pair files in their order, whatever their names."""
    dataset: NewDataset

    def run(self) -> int:
        import numpy as np

        from pointup.datasets.block_pairs import whole_pair
        from pointup.datasets.survey_tiles import hold_out

        sources, targets = paired_files(self.source, self.target, self.by_order)
        named = name_inputs(sources)
        numbers = np.column_stack([np.arange(len(named)), np.zeros(len(named), np.int64)])
        (held_out,) = hold_out([numbers], self.dataset.validation, self.dataset.seed, block=1)
        files = zip(named, named.values(), targets, strict=True)
        calls = [partial(whole_pair, *of_pair) for of_pair in files]
        repeated = list[int]()
        with self.dataset.making() as making:

            def pairs(is_validation: bool, title: str) -> Iterator[Pair]:
                rows = np.flatnonzero(held_out == is_validation).tolist()
                for pair, number in making.each([calls[row] for row in rows], len(rows), title):
                    repeated.append(number)
                    yield pair

            status = making.write(
                pairs(False, "training clouds"),
                pairs(True, "validation clouds"),
                {"command": "prepare clouds", **chosen(self, "source", "target")},
                shapes={name: _mesh_of(path) for name, path in named.items()},
            )
        if sum(repeated):
            note(f"left out {sum(repeated):,} points that are at the position of another point")
        return status


@dataclass(frozen=True, kw_only=True)
class H5:
    """Make pairs from HDF5 patches, as published with PU-Net, PU-GAN and PU1K (PU-GCN)."""

    inputs: Inputs
    """HDF5 files, or folders of them. Validation patches are those of whole shapes if a file names
    shapes, else blocks of neighbouring patches. Shapes of one name in several files are one
    shape."""
    source_key: Annotated[str | None, optional("NAME")] = None
    """Name of the array of sparse patches. By default one of the names in the published files."""
    target_key: Annotated[str | None, optional("NAME")] = None
    """Name of the array of dense patches. By default one of the names in the published files."""
    dataset: NewDataset

    def run(self) -> int:
        import numpy as np

        from pointup.datasets.hdf5_patches import hold_out_patches, open_patches, patch_pairs

        with self.dataset.making() as making:
            files = []
            for name, path in name_inputs(find_inputs(self.inputs, (".h5", ".hdf5"))).items():
                try:
                    files.append(open_patches(path, self.source_key, self.target_key, name))
                except FileError as error:
                    making.left_out.append(str(error))
            if not files:
                raise making.nothing_usable("no HDF5 file can be used")
            held_out = hold_out_patches(files, self.dataset.validation, self.dataset.seed)

            def pairs(split: bool, title: str) -> Iterator[Pair]:
                for file, held in zip(files, held_out, strict=True):
                    chosen = held == split
                    patches = patch_pairs(file, chosen, making.left_out.append)
                    try:
                        yield from tracked(patches, int(chosen.sum()), title)
                    except FileError as error:
                        making.left_out.append(str(error))

            info: dict[str, Any] = {"command": "prepare h5", "inputs": self.inputs}
            info |= {"arrays": [f"{file.source_key} -> {file.target_key}" for file in files]}
            info |= {"normals": [file.has_normals for file in files]}
            shapes = {
                f"{file.name}/{place}": file.shape_of(place)
                for file in files
                for place in np.unique(file.place).tolist()
            }
            return making.write(
                pairs(False, "training patches"),
                pairs(True, "validation patches"),
                info,
                shapes=shapes,
            )


@dataclass(frozen=True, kw_only=True)
class Default:
    """Make the default dataset of train.py: procedural shapes and simulated scans of landscapes."""

    num_pairs: int = 60
    """Number of pairs."""
    scene_share: float = 0.35
    """Share of pairs from landscapes, 0 to 1; the others are shapes."""
    close_sides: float = 0.0
    """Share of the shapes whose sides are close to each other, 0 to 1: parallel sheets, slots,
    notches, rods side by side."""
    dataset: NewDataset

    def __post_init__(self) -> None:
        if not 0 <= self.scene_share <= 1:
            raise ConfigError(f"--scene-share {self.scene_share}: must lie in [0, 1]")
        if not 0 <= self.close_sides <= 1:
            raise ConfigError(f"--close-sides {self.close_sides}: must lie in [0, 1]")
        if self.num_pairs < 1:
            raise ConfigError(f"--num-pairs {self.num_pairs}: must be at least 1")

    def run(self) -> int:
        from pointup.synthetic.default_dataset import default_pairs

        num_validation = round(self.dataset.validation * self.num_pairs)
        with self.dataset.making() as making:
            default_pairs(
                making.unfinished,
                self.dataset.seed,
                self.num_pairs - num_validation,
                num_validation,
                self.dataset.num_workers,
                self.scene_share,
                self.close_sides,
            )
            return making.publish()
