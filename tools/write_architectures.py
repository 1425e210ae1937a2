"""Write the table of architectures in docs/compatibility.md: `python -m tools.write_architectures`.

    python -m tools.write_architectures                     the table, from tools/architectures/record.json
    python -m tools.write_architectures --run FOLDER        what octile and transformers do with each model, anew
    python -m tools.write_architectures --run FOLDER --engines   and vLLM and SGLang, in environments made in FOLDER

The two environments take a download of some 500 MB and no GPU. Each has the engine and what its model
classes import, by tools/architectures/vllm.txt and sglang.txt, and torch of the environment that runs this command.
All together takes two minutes on two cores. FOLDER keeps the models and the environments, 3.4 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
RECORD = ROOT / "tools" / "architectures" / "record.json"
TABLE = re.compile(r"(?<=<!-- architectures -->\n).*?(?=<!-- end -->)", re.DOTALL)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
NO = "–"
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for, and write record and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="examine each model anew; its folders go here")
    parser.add_argument("--engines", action="store_true", help="have vLLM and SGLang load the folders, too")
    given = parser.parse_args(arguments)
    if given.engines and given.run is None:
        parser.error("--engines needs --run FOLDER")
    if given.run is not None:
        record = examine_all(given.run.resolve() / "models")
        old = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
        for engine in ENGINES:
            record[engine] = load_in(engine, given.run.resolve()) if given.engines else old[engine]
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), json.loads(RECORD.read_text("utf-8"))), encoding="utf-8")


def examine_all(folder: Path) -> Record:
    """Write the folders of all models anew, and return what octile and transformers do with them."""
    from tools.architectures.models import ALL, examine, write_folders  # transformers takes seconds to import

    if folder.exists():
        if others := sorted({path.name for path in folder.iterdir()} - set(ALL)):
            raise FileExistsError(f"{folder} has {others[0]}, which is none of these models; name another folder")
        shutil.rmtree(folder)
    found = {}
    for name in ALL:
        write_folders(name, folder / name)
        found[name] = examine(name, folder / name)
    return {"transformers": importlib.metadata.version("transformers"), "models": found}


def load_in(engine: str, folder: Path) -> Record:
    """Have an engine load the folders, in an environment of its own, which is made if it is not there.

    Returns:
        the engine's version, what it found, and the digests of the folders.
    """
    from tools.architectures.models import digest_of

    environment, out = folder / engine, folder / f"{engine}.json"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "octile.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        requirements = ROOT / "tools" / "architectures" / f"{engine}.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements], check=True)
    module, log = f"tools.architectures.load_in_{engine}", folder / f"{engine}.log"
    print(f"{ENGINES[engine]} loads the folders; its messages go to {log}", file=sys.stderr)
    with log.open("w") as messages:
        command = [python, "-m", module, folder / "models", out]
        subprocess.run(command, cwd=ROOT, check=True, stdout=messages, stderr=messages)
    ask = f"import importlib.metadata as m; print(m.version({engine!r}))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    digests = {path.name: digest_of(path / "fp8") for path in sorted((folder / "models").iterdir())}
    return {"version": version, "models": json.loads(out.read_text("utf-8")), "digests": digests}


def with_table(page: str, record: Record) -> str:
    """Return the page with the table written anew."""
    return TABLE.sub(lambda _: f"\n{table(record)}\n", page)


def table(record: Record) -> str:
    """Return the table, and a numbered line for each difference."""
    notes: dict[str, int] = {}

    def cell(reason: str, if_none: str = "yes") -> str:
        return f"no ({notes.setdefault(reason, len(notes) + 1)})" if reason else if_none

    engines = [f"{title} {record[engine]['version']}" for engine, title in ENGINES.items()]
    head = ["model", "layers in FP8", "trains", "saves", f"transformers {record['transformers']}", *engines]
    lines = [head, ["---"] * len(head)]
    for name, found in record["models"].items():
        converted, total = found["converted"]
        octile = [cell(found[column]) for column in ("trains", "saves", "transformers")]
        others = [_engine_cell(record, engine, name, cell) for engine in ENGINES]
        lines.append([name, f"{converted} of {total}", *octile, *others])
    rows = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return rows + "\n" + "".join(f"{number}. {reason}\n" for reason, number in notes.items())


def _engine_cell(record: Record, engine: str, name: str, cell: Any) -> str:
    found = record[engine]["models"].get(name)
    if found is None or record[engine]["digests"][name] != record["models"][name]["digest"]:
        return "not run"
    if "error" in found["bf16"]:
        return NO
    return str(cell(f"{ENGINES[engine]}: {why}" if (why := "; ".join(differences(found))) else ""))


def differences(found: dict[str, Any]) -> Iterator[str]:
    """Yield how an engine's loading of the FP8 folder differs from that of the BF16 folder."""
    if "error" in found["fp8"]:
        yield f"the FP8 folder is refused: `{found['fp8']['error']}`"
        return
    left = {key: sorted({*found["fp8"][key]} - {*found["bf16"][key]}) for key in ("unset", "unread")}
    for key, what in (("unset", "left unset"), ("unread", "not read")):
        if left[key]:
            more = f" and {len(left[key]) - 1} others are" if left[key][1:] else " is"
            yield f"`{left[key][0]}`{more} {what}, without an error"
            return  # what is left unset was not read


if __name__ == "__main__":
    main()
