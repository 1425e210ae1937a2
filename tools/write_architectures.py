"""Write the table of docs/supported_models.md: `python -m tools.write_architectures`.

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
PAGE = ROOT / "docs" / "supported_models.md"
RECORD = ROOT / "tools" / "architectures" / "record.json"
TABLE = re.compile(r"(?<=<!-- architectures -->\n).*?(?=<!-- end -->)", re.DOTALL)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
NO = "–"
PUBLISHED = {  # model_type → what people call the models that have it
    "bert": "BERT",
    "bloom": "BLOOM, BLOOMZ",
    "cohere": "Command R, Aya",
    "cohere2": "Command R7B, Command A",
    "deepseek_v2": "DeepSeek-V2, V2-Lite, V2.5",
    "deepseek_v3": "DeepSeek-V3, R1, V3.1, Moonlight",
    "deepseek_v32": "DeepSeek-V3.2",
    "ernie4_5_moe": "ERNIE 4.5",
    "exaone4": "EXAONE 4.0",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 with images",
    "gemma3_text": "Gemma 3, text",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm_moe_dsa": "GLM-5",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "granitemoe": "Granite MoE",
    "jamba": "Jamba",
    "llama": "Llama 1 to 3.3, many others",
    "llama4": "Llama 4 with images",
    "llama4_text": "Llama 4, text",
    "llava": "LLaVA",
    "minimax_m2": "MiniMax-M2",
    "mistral": "Mistral 7B, Nemo",
    "mistral3": "Mistral Small 3.1",
    "mixtral": "Mixtral",
    "mllama": "Llama 3.2 Vision",
    "mpt": "MPT",
    "nemotron": "Nemotron 3, 4",
    "olmo2": "OLMo 2",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi": "Phi-1, Phi-2",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen2, Qwen2.5, QwQ",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen2_vl": "Qwen2-VL",
    "qwen3": "Qwen3",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "qwen3_5_text": "Qwen3.5, text",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL-30B-A3B",
    "roberta": "RoBERTa",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "t5": "T5",
    "whisper": "Whisper",
}
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
        (packages / "octile.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", "utf-8")
        requirements = ROOT / "tools" / "architectures" / f"{engine}.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", requirements], check=True)
    module, log = f"tools.architectures.load_in_{engine}", folder / f"{engine}.log"
    print(f"{ENGINES[engine]} loads the folders; its messages go to {log}", file=sys.stderr)
    with log.open("w", encoding="utf-8") as messages:
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
    octile = ["model", "published as", "parameters", "trains", "saves", "FP8 folder"]
    head = [*octile, f"transformers {record['transformers']}", *engines]
    lines = [head, ["---", "---", "---:", "---", "---", "---", *["---"] * (1 + len(engines))]]
    for name, found in record["models"].items():
        default = found["default"]
        size = billions(default["parameters"]) if default else NO
        trained, stored = (f"{default[key]}%" if default else "yes" for key in ("trained", "stored"))
        cells = [cell(found["trains"], trained), cell(found["saves"]), stored, cell(found["transformers"])]
        others = [_engine_cell(record, engine, name, cell) for engine in ENGINES]
        lines.append([name, PUBLISHED[found["model_type"]], size, *cells, *others])
    rows = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return rows + "\n" + "".join(f"{number}. {reason}\n" for reason, number in notes.items())


def billions(parameters: int) -> str:
    """Return a number of parameters as 671B, 6.7B or 0.13B."""
    size = parameters / 1e9
    return f"{size:.{0 if size >= 100 else 1 if size >= 1 else 2}f}B"


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
