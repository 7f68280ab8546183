"""Asks TensorFlow what tf.distribute does and writes the answers to `data/`.

Needs TensorFlow 2.21 and nothing of distjax: see README.md beside this file.
"""

import importlib
import json
import os
import pathlib
import sys

from tests.golden.recording import tensorflow_side

AREAS = (
    "training",
    "metrics",
    "reductions",
    "gradients",
    "variables",
    "checkpoints",
    "inputs",
    "steps",
    "contexts",
    "closures",
    "coordinator",
)
DATA = pathlib.Path(__file__).parent / "data"


def write(area, records):
    """Writes the records of one area, one per line, so that a difference is a line."""
    ids = [record["id"] for record in records]
    assert len(ids) == len(set(ids)), sorted(x for x in ids if ids.count(x) > 1)
    head = {
        "tensorflow": tensorflow_side.tf.__version__,
        "recorded_by": f"tests/golden/recording/{area}.py",
        "devices": f"{tensorflow_side.NUM_DEVICES} virtual CPU devices",
    }
    lines = [f'"{key}": {json.dumps(value)},' for key, value in head.items()]
    rows = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    text = "{\n" + "\n".join(lines) + '\n"records": [\n' + rows + "\n]\n}\n"
    (DATA / f"{area}.json").write_text(text)
    print(f"{area}: {len(records)} records")


def main(areas):
    tensorflow_side.start()
    DATA.mkdir(exist_ok=True)
    for area in areas or AREAS:
        module = importlib.import_module(f"tests.golden.recording.{area}")
        records = [{"id": i, "case": case, "outcome": out} for i, case, out in module.records()]
        write(area, records)
    sys.stdout.flush()
    os._exit(0)  # threads of coordinators never end


if __name__ == "__main__":
    main(sys.argv[1:])
