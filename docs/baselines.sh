#!/usr/bin/env bash
# Makes the tables of "Beside baselines that are hard to beat" in results.md again:
#     docs/baselines.sh SURVEYS WORK [MODEL]
# SURVEYS holds the survey files, WORK gets the datasets (made once) and the figures, as JSON.
set -euo pipefail
surveys=$(realpath "$1") work=$2 model=${3:-lidar}
mkdir -p "$work"
cd "$work"

thin() {  # NAME FILE TILE BLOCK: tiles of a thinned survey, a tenth of its blocks held out
    for ratio in 2 4; do
        [ -d "$1$ratio" ] || pointup prepare thin --pattern mixed "$surveys/$2" \
            --ratio $ratio --tile "$3" --block "$4" -o "$1$ratio"
        pointup evaluate pairs "$1$ratio" --model "$model" --as-written --json "$1$ratio.json"
    done
}
thin autzen autzen_trim.las 80 2
thin las las_with_several_extra_byte_bloc.laz 25 4
thin star lone-star.copc.laz 1.5 6
thin ahn AHN3.laz 20 3
for ratio in 2 8; do
    pointup evaluate lidar --source "$surveys/transect_als.laz" --reference \
        "$surveys/transect_drone.laz" --ratio $ratio --model "$model" --json "forest$ratio.json"
done

python - <<'PYTHON'
import json
from pathlib import Path

METHODS = ("model", "midpoints", "random_midpoints", "jitter", "plane", "source")
HEAD = f"| | | {' | '.join(m.replace('_', ' ') for m in METHODS)} |\n|---|---|{'---:|' * len(METHODS)}"


def line(name, label, rows, figure, digits):
    values = [rows.get(method, {}).get(figure) for method in METHODS]
    better = max if figure.startswith(("f_score", "height")) else min
    best = better(value for value in values if value is not None)
    cells = ["-" if v is None else f"{v:.{digits}f}" for v in values]
    cells = [f"**{c}**" if v == best else c for c, v in zip(cells, values)]
    return f"| {name} | {label} | {' | '.join(cells)} |"


print(HEAD)
for survey in ("autzen", "las", "star", "ahn"):
    for ratio in (2, 4):
        content = json.loads(Path(f"{survey}{ratio}.json").read_text())
        name = f"{Path(content['dataset']).name[:-1]} ({content['unit']}), {ratio}x"
        for figure, title in (("chamfer", "Chamfer"), ("f_score_0.25", "F-score at 0.25 m, %")):
            print(line(name, title, content["means"], figure, 4 if figure == "chamfer" else 2))
            name = ""
FIGURES = {
    "chamfer": 4, "to_reference": 4, "from_reference": 4, "hausdorff": 2, "f_score_0.25": 2,
    "f_score_0.5": 2, "beyond_0.5": 2, "beyond_1": 2, "farthest_new": 2, "below_ground_points": 0,
    "ground_rmse": 3, "canopy_rmse": 3, "height_overlap": 2,
}  # fmt: skip
for ratio in (2, 8):
    content = json.loads(Path(f"forest{ratio}.json").read_text())
    print("\n" + HEAD)
    name = f"forest, {ratio}x"
    for figure, digits in FIGURES.items():
        metric = content["metrics"][figure]
        label = ", ".join(filter(None, (metric["title"].strip(), metric["unit"])))
        print(line(name, label, content["rows"], figure, digits))
        name = ""
PYTHON
