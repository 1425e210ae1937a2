"""tools/sanitize.sh selects GPU tests by name; the names must exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_selected_tests_exist():
    script = (ROOT / "tools" / "sanitize.sh").read_text()
    (elementwise,), (attention,) = (
        re.findall(f'{which}_FILES="(.*)"', script) for which in ("ELEMENTWISE", "ATTENTION")
    )
    files = {f"tests/gpu/test_{name}.py" for name in elementwise.split()}
    files |= {f"tests/gpu/cuda/test_{name}.py" for name in attention.split()}
    files |= set(re.findall(r"tests/gpu/[\w/]+\.py", script))
    assert len(files) == 17
    tests = re.findall(r"def (test_\w+)", "".join((ROOT / file).read_text() for file in files))
    selected = set(re.findall(r"\btest_\w+", re.sub(r"tests/gpu/\S+", "", script)))
    assert len(selected) > 25
    assert [name for name in selected if not any(test.startswith(name) for test in tests)] == []
