"""The list of files in the room's docstring."""

from pathlib import Path

from octile import serve


def test_the_list_has_every_file():
    assert serve.__doc__ is not None
    assert serve.__file__ is not None
    listed = [line.split()[0] for line in serve.__doc__.splitlines() if line.startswith("    ")]
    room = Path(serve.__file__).parent
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)
