#!/usr/bin/env bash
# Computes the table "Surveys" of results.md, and the same with thinning patterns in turn:
#     docs/baselines.sh SURVEYS WORK [MODEL]
# SURVEYS holds the survey files, WORK receives the datasets (prepared once) and the figures, as JSON.
set -euo pipefail
surveys=$(realpath "$1") work=$2 model=${3:-lidar}
mkdir -p "$work"
cd "$work"

# NAME FILE TILE BLOCK METRES: tiles of a survey thinned at random, or by patterns in turn; a tenth
# of its blocks is held out. METRES is the unit, for files without a coordinate system.
thin() {
    for pattern in random mixed; do
        for ratio in 2 4; do
            local data=$1-$pattern-$ratio
            [ -d "$data" ] || pointup prepare thin --pattern $pattern "$surveys/$2" \
                --ratio $ratio --tile "$3" --block "$4" -o "$data"
            pointup evaluate pairs "$data" --model "$model" --as-written \
                --metres-per-unit "$5" --json "$data.json"
        done
    done
}
thin autzen autzen_trim.las 80 2 0.3048
thin las las_with_several_extra_byte_bloc.laz 25 4 1
thin lone-star lone-star.copc.laz 1.5 6 1
thin AHN3 AHN3.laz 20 3 1
for ratio in 2 8; do
    pointup evaluate lidar --source "$surveys/transect_als.laz" --reference \
        "$surveys/transect_drone.laz" --ratio $ratio --model "$model" --json "forest$ratio.json"
done

python - <<'PYTHON'
import json
from pathlib import Path

METHODS = ("model", "midpoints", "random_midpoints", "jitter", "plane", "source")
TITLES = [{"midpoints": "midpoint baseline"}.get(m, m.replace("_", " ")) for m in METHODS]
HEAD = f"| | | {' | '.join(TITLES)} |\n|---|---|{'---:|' * len(METHODS)}"


def line(name, label, rows, figure, digits):
    values = [rows.get(method, {}).get(figure) for method in METHODS]
    better = max if figure.startswith(("f_score", "height")) else min
    best = better(value for value in values if value is not None)
    cells = ["-" if v is None else f"{v:.{digits}f}" for v in values]
    cells = [f"**{c}**" if v == best else c for c, v in zip(cells, values)]
    return f"| {name} | {label} | {' | '.join(cells)} |"


print(HEAD.replace("| | |", "| Chamfer | thinned |", 1))
for survey in ("autzen", "las", "lone-star", "AHN3"):
    for pattern, title in (("random", "at random"), ("mixed", "patterns in turn")):
        for ratio in (2, 4):
            content = json.loads(Path(f"{survey}-{pattern}-{ratio}.json").read_text())
            name = f"{survey} ({content['unit']}), {ratio}x"
            print(line(name, title, content["means"], "chamfer", 4))
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
