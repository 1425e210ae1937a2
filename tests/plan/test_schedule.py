"""`octile plan schedule` on the command line."""

import pytest

from octile.parallel.schedules import SCHEDULES, Costs
from octile.plan.commands import COMMANDS
from octile.plan.schedule import compare_schedules
from tests.test_cli import call, refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_command_the_commands_are_listed(capsys):
    code, out, _ = call(capsys, "plan")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_an_unknown_command_is_refused(capsys):
    assert "unknown plan command 'clusters'; there are cluster, experts, published, schedule" in refused(
        capsys, "plan", "clusters"
    )


@pytest.mark.one_case
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_drawn(capsys, folder, name):
    options = ("--schedule", name, "--stages", "2", "--micro-batches", "4", "--out", f"{name}.svg")
    code, out, err = call(capsys, "plan", "schedule", *options)
    assert (code, err) == (0, "")
    assert f"picture: {name}.svg" in out
    assert SCHEDULES[name].title in (folder / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_path_with_brackets_is_printed_in_full(capsys, folder):
    code, out, err = call(capsys, "plan", "schedule", "--out", "new [/old].svg")
    assert (code, err) == (0, "")
    assert "picture: new [/old].svg" in out


@pytest.mark.slow
def test_without_options_dualpipe_is_compared_with_the_others_in_80_columns(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, "plan", "schedule")
    assert code == 0
    assert (folder / "plan" / "schedule.svg").exists()
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "66  9.1% 6 = (PP/2−1)(F&B+B−3W)       9 = PP+1         2×" in rows["DualPipe"]
    assert "7 = (PP−1)(F+B−2W)" in rows["ZB1P"]
    assert "not at this size: chimera needs micro-batches that 8 stages divide, not 20" in out


def test_all_schedules_are_compared_at_a_size_that_all_allow():
    table, notes = compare_schedules(4, 8, Costs())
    assert [row[0] for row in table.rows] == [kind.title for kind in SCHEDULES.values()]
    assert notes == ["the bubble of chimera is exactly that of its formula if M = PP"]


def test_the_formulas_are_said_to_leave_out_communication():
    assert compare_schedules(2, 2, Costs(communication=1))[1][-1] == "formulas leave out communication"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stages", "7"), "dualpipe needs an even number of stages, not 7"),
        (("--micro-batches", "14"), "dualpipe needs at least 16 micro-batches, not 14"),
        (("--stages", "0"), "--stages must be at least 1, not 0"),
        (("--micro-batches", "626"), "--stages × --micro-batches must be at most 5,000, not 5,008"),
        (("--schedule", "zbv"), "--schedule must be one of gpipe, 1f1b"),
        (("--costs.forward", "0"), "--costs.forward must be above 0, not 0.0"),
        (("--out", "schedule.pdf"), "--out must end in .svg or .png, not 'schedule.pdf'"),
        (("--out", "."), "out '.' is a folder: name a file"),
        (("--out", "/dev/null/a.svg"), "cannot be written: '/dev/null' is not a folder"),
        (("--stages", "64", "--micro-batches", "2000"), "must be at most 5,000, not 128,000"),
        (("--costs.forward", "1e-300"), "costs: the longest may be 312 times the shortest"),
        (("--costs.forward", "1e308", "--costs.pair", "1e308"), "must be at most 1e+100, not 1e+308"),
        (("--costs.pair", "0.5"), "--costs.pair must be at least (F + B) / 2 = 1.5, half of what both passes take"),
        (("--costs.forward", "1e100"), "costs: the longest may be 312 times the shortest"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options_are_refused_before_anything_is_written(capsys, folder, options, message):
    assert message in refused(capsys, "plan", "schedule", *options)
    assert not list(folder.iterdir())
