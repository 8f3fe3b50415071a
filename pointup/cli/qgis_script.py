# mypy: ignore-errors
"""QGIS: a Processing script that runs `pointup upsample` and loads what it writes.

In QGIS, Processing Toolbox > Scripts > Add Script to Toolbox, choose this file. pointup stays in
its own Python environment; the script calls its program.
"""

import json
import os
import queue
import re
import shutil
import subprocess
import threading
from pathlib import Path

from qgis.core import (
    QgsPointCloudLayer,
    QgsProcessingAlgorithm,
    QgsProcessingContext,
    QgsProcessingException,
    QgsProcessingParameterFile,
    QgsProcessingParameterFolderDestination,
    QgsProcessingParameterNumber,
    QgsProcessingParameterString,
)

PROGRESS = re.compile(r"([\d,]+) of ([\d,]+) points")
MODELS = "lidar, forest, or a folder with a trained model; empty: by the format of the input"


class UpsamplePoints(QgsProcessingAlgorithm):
    def createInstance(self):
        return UpsamplePoints()

    def name(self):
        return "upsample"

    def displayName(self):
        return "Upsample point clouds"

    def group(self):
        return "pointup"

    def groupId(self):
        return "pointup"

    def shortHelpString(self):
        return (
            "Adds points between the measured ones of a file, or of all tiles of a folder. "
            "Measured points stay as they are; new ones have the synthetic flag."
        )

    def initAlgorithm(self, config=None):
        file, folder = QgsProcessingParameterFile.File, QgsProcessingParameterFile.Folder
        number = QgsProcessingParameterNumber
        for parameter in (
            QgsProcessingParameterFile("INPUT", "Point cloud (also .vpc)", file, optional=True),
            QgsProcessingParameterFile("FOLDER", "Or a folder of tiles", folder, optional=True),
            QgsProcessingParameterString("MODEL", f"Model: {MODELS}", optional=True),
            number("RATIO", "Points out for each point in", number.Double, 4.0, minValue=1.0),
            number(
                "DENSITY",
                "Or points per square unit, in place of the ratio",
                number.Double,
                optional=True,
                minValue=0.0,
            ),
            QgsProcessingParameterString(
                "CLASSES", "Only points of these classes, such as 2,3,4,5", optional=True
            ),
            QgsProcessingParameterString(
                "PROGRAM",
                "Program",
                os.environ.get("POINTUP") or shutil.which("pointup") or "pointup",
            ),
            QgsProcessingParameterFolderDestination("OUTPUT", "Folder of the upsampled files"),
        ):
            self.addParameter(parameter)

    def processAlgorithm(self, parameters, context, feedback):
        named = [self.parameterAsString(parameters, name, context) for name in ("INPUT", "FOLDER")]
        if len(sources := [name for name in named if name]) != 1:
            raise QgsProcessingException("Choose either a point cloud or a folder of tiles.")
        output = Path(self.parameterAsString(parameters, "OUTPUT", context))
        command = [self.parameterAsString(parameters, "PROGRAM", context), "upsample", *sources]
        command += ["-o", f"{output}{os.sep}"]
        if model := self.parameterAsString(parameters, "MODEL", context):
            command += ["--model", model]
        if parameters.get("DENSITY") is not None:
            density = self.parameterAsDouble(parameters, "DENSITY", context)
            command += ["--density", str(density)]
        else:
            command += ["--ratio", str(self.parameterAsDouble(parameters, "RATIO", context))]
        if classes := self.parameterAsString(parameters, "CLASSES", context):
            command += ["--classes", ",".join(classes.replace(",", " ").split())]
        feedback.pushInfo(" ".join(command))
        lines = run(command, feedback)
        # The folder can have files of earlier runs, too; messages name a file of this one, or the
        # list of several.
        named = {Path(line[line.rfind(f": {output}") + 2 :]) for line in lines}
        for line in lines:
            path, is_list, _ = line.partition(": a virtual point cloud of ")
            # QGIS 3.32 and newer show the list as one layer.
            if is_list and load(Path(path), context, feedback, "vpc"):
                return {"OUTPUT": str(output)}
            if is_list:
                items = json.loads(Path(path).read_text(encoding="utf-8"))["features"]
                named = {output / item["assets"]["data"]["href"] for item in items}
        for path in sorted(output.rglob("*")):
            if path.suffix.lower() in (".las", ".laz") and path in named:
                load(path, context, feedback, "pdal")
        return {"OUTPUT": str(output)}


def run(command, feedback):
    """Run the program; its progress and its messages reach QGIS, and Cancel ends it.

    Returns the messages. A failure is an error only if no file was written: others are loaded.
    """
    # QGIS sets these for its own Python.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    environment["PYTHONIOENCODING"] = "utf-8"  # Windows has another encoding.
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise QgsProcessingException(f"{command[0]}: {error}. Set Program to its path.") from error
    lines = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout])
    reader.start()
    seen = [""]
    while reader.is_alive() or not lines.empty():
        if feedback.isCanceled():
            process.terminate()
            break
        try:
            seen.append(lines.get(timeout=0.2).rstrip())
        except queue.Empty:
            continue
        feedback.pushInfo(seen[-1])
        if found := PROGRESS.search(seen[-1]):
            done, total = (int(number.replace(",", "")) for number in found.groups())
            feedback.setProgress(100 * done / max(total, 1))
    status = process.wait()
    reader.join()
    process.stdout.close()
    if status and not feedback.isCanceled():
        message = seen[-1] or f"pointup ended with status {status}"
        if not any(re.search(r"[1-9][\d,]* (files? written|skipped),", line) for line in seen):
            raise QgsProcessingException(message)
        feedback.reportError(message)
    return seen


def load(path, context, feedback, provider):
    """Add a file to the map once the algorithm ends; whether this QGIS can read it."""
    layer = QgsPointCloudLayer(str(path), path.stem, provider)
    if not layer.isValid():
        feedback.pushInfo(f"{path}: this QGIS reads no {path.suffix} files; it is not loaded")
        return False
    context.temporaryLayerStore().addMapLayer(layer)
    details = QgsProcessingContext.LayerDetails(path.stem, context.project(), path.stem)
    context.addLayerToLoadOnCompletion(layer.id(), details)
    return True
