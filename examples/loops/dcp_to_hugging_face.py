"""From torch's own distributed checkpoint of a transformers model to a folder that `from_pretrained` opens.

    python examples/loops/dcp_to_hugging_face.py CHECKPOINT CONFIG PUBLISHED

CHECKPOINT was written by `torch.distributed.checkpoint.save({"model": model.state_dict()})` on any ranks, CONFIG is the
model's config.json. No process group is needed, and the conversion holds a buffer, never the model.
"""

import argparse
import shutil
from pathlib import Path

import torch

from lamella_convert import convert, diff


def main() -> None:
    """Convert, compare both by reading every number, and print what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("config", type=Path)
    parser.add_argument("published", type=Path)
    options = parser.parse_args()

    conversion = convert(options.checkpoint, options.published, to="hf", dtype=torch.bfloat16)
    shutil.copyfile(options.config, options.published / "config.json")
    differences = diff(options.checkpoint, options.published, rtol=2**-8).differences
    unexpected = [difference for difference in differences if difference.what != "dtype"]
    print(f"{conversion.num_tensors} tensors; besides dtypes {len(unexpected)} differences")


if __name__ == "__main__":
    main()
