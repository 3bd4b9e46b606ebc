"""A model in parts that are small enough to travel to a machine without network.

    python extras/dev/parts.py split MODEL FOLDER    a model's folder -> FOLDER/part-00, ...
    python extras/dev/parts.py join FOLDER MODEL     the same model, with its weights in bf16

All parts but the last have 50 MB. FOLDER/SHA256 is the checksum of them all.
"""
import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import runs

PART = 50_000_000  # bytes


def split(model, folder):
    folder = Path(folder)
    runs.need(not folder.exists(), f"{folder} exists. Give another folder.")
    runs.need(Path(model).is_dir(), f"{model} is no folder.")
    with tempfile.TemporaryDirectory() as temporary, runs.quiet_transformers():
        small = Path(temporary, "model")
        policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        policy.save_pretrained(small)
        transformers.AutoTokenizer.from_pretrained(model).save_pretrained(
            small, save_jinja_files=False)
        whole = Path(temporary, "model.tar")
        with tarfile.open(whole, "w") as tar:
            for file in sorted(small.iterdir()):
                tar.add(file, file.name)
        folder.mkdir(parents=True)
        with open(whole, "rb") as tar:
            number = 0
            while piece := tar.read(PART):
                Path(folder, f"part-{number:02}").write_bytes(piece)
                number += 1
    Path(folder, "SHA256").write_text(checksum(folder))
    print(f"{number} parts in {folder}")


def join(folder, model):
    runs.need(not Path(model).exists(), f"{model} exists. Give another folder.")
    runs.need(checksum(folder) == Path(folder, "SHA256").read_text(),
              f"{folder}: a part is missing or damaged, because the checksum differs.")
    with tempfile.TemporaryFile() as whole:
        for part in parts(folder):
            whole.write(part.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            tar.extractall(model, filter="data")
    print(f"joined: {model}")


def parts(folder):
    return sorted(Path(folder).glob("part-*"))


def checksum(folder):
    found = hashlib.sha256()
    for part in parts(folder):
        found.update(part.read_bytes())
    return found.hexdigest()


def main():
    with runs.one_line_errors():
        if len(sys.argv) != 4 or sys.argv[1] not in ("split", "join"):
            sys.exit(__doc__)
        {"split": split, "join": join}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
