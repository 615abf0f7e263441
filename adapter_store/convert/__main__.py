"""`python -m adapter_store.convert`: makes a PEFT folder of an adapter in another form.

The form is known by the file with the weights: adapter_model.bin is PEFT's old one, a pickle, of which
nothing is run; adapters.safetensors is mlx-lm's; lora.safetensors, with params.json, is mistral-finetune's.
"""

import argparse
import sys
from pathlib import Path

from adapter_store.convert.folder import FORMS, convert
from adapter_store.errors import AdapterStoreError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m adapter_store.convert", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"with one of {', '.join(FORMS)}")
    parser.add_argument("new_folder", type=Path, metavar="NEW_FOLDER", help="is made")
    args = parser.parse_args()
    try:
        convert(args.folder, args.new_folder)
    except (AdapterStoreError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
