"""Tests of the page of one training run."""

import math
import re

import pytest

from octile.report import save_figure, write_run_report
from octile.report.run import page as run_page
from tests.report.conftest import (
    CONFIG,
    SUMMARY,
    complete_run,
    experts,
    read_page,
    tile_scales,
    training,
    validation,
    write_run,
)
from tests.report.layout import faults_of_pages, signed_zeros

SAMPLE = "def total(x):\n    return x\n"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The page of a complete run, and the faults of its figures."""
    with pytest.MonkeyPatch.context() as patch:
        found = faults_of_pages(patch)
        return write_run_report(write_run(tmp_path_factory.mktemp("complete"), complete_run(), sample=SAMPLE)), found


@pytest.fixture(scope="module")
def path(drawn):
    return drawn[0]


@pytest.fixture(scope="module")
def page(path):
    return read_page(path)


@pytest.mark.slow
def test_the_page_loads_nothing(page):
    assert all(address.startswith(("#", "data:")) for address in page.loads)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(page.tags)


def test_the_page_holds_no_address(path):
    assert "://" not in path.read_text()


def test_references_inside_the_page_have_exactly_one_target(page):
    targets = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(targets) == len(set(targets))
    assert {address[1:] for address in page.loads if address.startswith("#")} <= set(targets)


def test_every_figure_has_a_sentence_and_names_itself_to_a_screen_reader(page):
    figures = page.tags.count("figure")
    assert figures == page.tags.count("figcaption") == 7
    assert all(attributes.get("aria-label") for tag, attributes in page.elements if tag == "svg")


def test_the_headline_gives_the_last_held_out_loss(page):
    loss = 2.9471 + 1 / 40
    assert f"{loss:.4f} nats per token · perplexity {math.exp(loss):.2f}" in page.words


def test_the_headline_gives_bits_a_byte(page):
    assert f"{(2.9471 + 1 / 40) / math.log(2) / 3.2:.3f} bits per byte" in page.words


FACTS = [
    "8.13M 3.20M active per token with the embedding",
    "81.9k in 40 recorded steps",
    "Held out 9.6% of the text: 2,310 tokens in 6 spans",
    "14.0 s",
    "6,020",
    "Model FLOPs 6.0 TFLOP/s (median), 25.0% MFU",
]


@pytest.mark.parametrize("fact", FACTS)
def test_the_headline_gives_what_was_recorded(page, fact):
    assert fact in page.words


@pytest.mark.usefixtures("without_figures")
def test_the_headline_names_validation_data(make_run):
    summary = {name: value for name, value in SUMMARY.items() if name != "held_out_share"}
    run = make_run([training(1)], config={**CONFIG, "val_data": "val.txt"}, summary=summary)
    assert "Held out all of val.txt: 2,310 tokens in 6 spans" in read_page(write_run_report(run)).words


def test_the_lead_names_recipe_steps_and_machine(page):
    assert "trained with the recipe deepseek_v3 for 40 steps on 2 CPU cores." in page.words


def test_the_maximum_expert_load_is_named(page):
    assert "The maximum expert load is 1.75× the mean, in layer 3" in page.words


def test_the_range_of_the_tile_scales_is_named(page):
    assert "output gradients dy lie between 2⁻³⁰ and 2⁻¹², a factor of 262k: with one scale for the" in page.words


def test_the_learning_rate_is_named(page):
    assert "has its peak of 0.003 at step 5" in page.words


def test_clipping_is_counted(page):
    assert "8% of the steps were clipped to norm 1." in page.words  # 0.5 + 2 / step > 1 in 3 steps of 40


@pytest.mark.usefixtures("without_figures")
def test_the_clipping_of_almost_all_steps_is_explained(make_run):
    run = make_run([training(step, grad_norm=1.5 if step > 2 else 0.9) for step in range(1, 41)])
    words = read_page(write_run_report(run)).words
    assert (
        "The gradient norm was 1.5 at step 3, its maximum, and 1.5 in the median. 95% of the steps were clipped"
        in words
    )
    assert (
        "clipped to norm 1: almost all gradients have this norm then, and the same weight in AdamW's moments." in words
    )


@pytest.mark.usefixtures("without_figures")
def test_the_optimizers_of_a_run_with_muon_are_named(make_run):
    run = make_run(
        [training(step, grad_norm=1.5) for step in (1, 2)], config={**CONFIG, "optim": {"name": "muon", "clip": 1.0}}
    )
    assert "does not change Muon's and AdamW's updates" in read_page(write_run_report(run)).words


def test_the_clipping_of_few_steps_is_not_explained(page):
    assert "AdamW" not in page.words


ORIGIN = {
    "measured_on": {"date": "2026-11-25", "octile": "0.1.0", "commit": "0123456789ab"},
    "command": "octile train --steps 40 --data 'my text'",
}


@pytest.mark.usefixtures("without_figures")
def test_the_head_names_data_date_commit_and_command(make_run):
    run = make_run(complete_run(), config={**CONFIG, "data": "my text"}, summary=ORIGIN)
    words = read_page(write_run_report(run)).words
    assert (
        "Data: my text. Ended on 2026-11-25 by octile 0.1.0, commit 0123456789ab. "
        "Command: octile train --steps 40 --data 'my text'"
    ) in words


@pytest.mark.usefixtures("without_figures")
def test_initial_weights_and_a_warm_up_of_indexers_are_named(make_run):
    lines = [training(step, indexer_loss=3.0 - step) for step in (1, 2)]
    config = {**CONFIG, "data": "stdlib", "init_from": "runs/dense", "indexer_stage": "warm_up"}
    words = read_page(write_run_report(make_run(lines, config=config))).words
    assert "Began with the weights of runs/dense. Data: stdlib." in words
    assert "Only the indexers were trained, so the training loss" in words
    assert "Indexers' loss 1.0000 nats, 2.0000 at first" in words


@pytest.mark.usefixtures("without_figures")
def test_the_head_of_a_run_that_has_not_ended_names_its_data(make_run):
    words = read_page(
        write_run_report(make_run(complete_run(), config={**CONFIG, "data": "stdlib"}, summary=None))
    ).words
    assert "Data: stdlib." in words


def test_every_setting_is_in_the_page(page):
    for setting in ("model.vocab_size 4096", "optim.betas [0.9, 0.95]", "model.rope_scaling null"):
        assert setting in page.words


def test_the_prompt_is_distinguished_from_the_generated_text(page):
    assert ("b", {}) in page.elements[page.tags.index("pre") :]


@pytest.mark.slow
def test_html_in_texts_is_escaped(make_run):
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x00\x1b[31m"
    config = {"preset": "<b>tiny</b>", "recipe": "<script>1</script>", "steps": 3}
    run = make_run([training(1), experts(1, **{"L<script>": [1, 2]})], config=config, sample=hostile)
    page = read_page(write_run_report(run))
    assert not {"script", "img"} & set(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert not {"\x00", "\x1b"} & set(page.text)


@pytest.mark.slow
def test_the_same_files_give_the_same_page(tmp_path_factory):
    runs = (write_run(tmp_path_factory.mktemp("run"), complete_run(), sample=SAMPLE) for _ in range(2))
    first, second = (write_run_report(run).read_bytes() for run in runs)
    assert first == second


@pytest.mark.usefixtures("without_figures")
def test_a_page_is_written_to_a_temporary_file_and_renamed(make_run):
    run = make_run([training(1)])
    write_run_report(run)
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]


@pytest.mark.slow
def test_a_figure_that_fails_leaves_the_old_page(make_run, monkeypatch):
    run = make_run([training(1)])
    old = write_run_report(run).read_bytes()
    monkeypatch.setattr("octile.report.svg.to_svg", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_run_report(run)
    assert (run / "report.html").read_bytes() == old


@pytest.mark.usefixtures("without_figures")
def test_a_full_disk_leaves_the_old_page_and_is_named(make_run, full_disk):
    run = make_run([training(1)])
    old = write_run_report(run).read_bytes()
    full_disk(1000)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"):
        write_run_report(run)
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob("*.partial"))


@pytest.mark.one_case
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [training(1)],
        [training(1, grad_norm=0.0, lr=0.0)],
        [training(step) for step in range(1, 30)],
        [training(1), training(2, loss=math.nan, main_loss=math.nan, mtp_loss=math.nan, grad_norm=math.inf)],
        [training(1, loss=math.nan, main_loss=math.nan, mtp_loss=math.nan), validation(1, 8.0)],
        [training(1), validation(1, 1e4), training(2), validation(2, 1e5)],
        [training(1), validation(1, math.nan)],
        [{"step": 1, "loss": 8.0}],
        [validation(0, 8.3)],
        [training(1), experts(1, L1=[0, 0, 0])],
        [training(1), experts(1, L1=[0, 7, 0]), experts(2, L1=[1, 2, 3, 4], L2=[1, 1])],
        [training(1), {"step": 1, "tile_scales": {"x": {"log2": [], "count": []}}}],
        [training(1), {"step": 1, "tile_scales": {"new": {"log2": [3, 9], "count": [1, 2]}}}],
        [training(step) for step in range(1, 2000)],
    ],
    ids=[
        "empty", "one step", "zero norm and rate", "no validation", "NaN", "only NaN", "hopeless", "NaN validation",
        "only a loss", "only a validation", "no token routed", "experts changed", "no tile", "new operand", "long",
    ],
)  # fmt: skip
def test_a_partial_run_gets_a_page(make_run, metrics):
    assert "Configuration" in read_page(write_run_report(make_run(metrics, summary=None))).words


@pytest.mark.usefixtures("without_figures")
def test_the_page_of_a_run_without_validation_says_so(make_run):
    assert "has not been measured yet" in read_page(write_run_report(make_run([training(1), training(2)]))).words


@pytest.mark.usefixtures("without_figures")
def test_the_page_of_an_unfinished_run_names_its_last_step(make_run):
    assert "for 2 of 40 steps" in read_page(write_run_report(make_run([training(1), training(2)]))).words


@pytest.mark.usefixtures("without_figures")
def test_the_step_of_the_model_and_memorization_are_reported(make_run):
    lines = [training(step, main_loss=4.0 - step / 10) for step in range(1, 9)]
    lines += [validation(2, 4.0), validation(4, 3.88), validation(6, 4.5), validation(8, 6.5)]
    page = read_page(write_run_report(make_run(lines, summary={"model_step": 4, "model_val_loss": 3.88})))
    assert "model/ is the model after step 4, which has the lowest held-out loss, 3.8800; after step 8 it" in page.words
    assert "After step 4 the run memorized its training text: held-out loss rose from 3.880 to 6.500" in page.words


@pytest.mark.usefixtures("without_figures")
def test_the_held_out_loss_of_averaged_weights_is_named(make_run):
    lines = [line | ({"ema_val_loss": line["val_loss"] - 0.2} if "val_loss" in line else {}) for line in complete_run()]
    words = read_page(write_run_report(make_run(lines))).words
    assert "Held-out loss, EMA 2.7721 nats per token, of the weights averaged up to step 40: model_ema/" in words
    assert "EMA is the held-out loss of the averaged weights, 2.77 in the end." in words


def test_averaged_weights_have_a_curve(make_run, tmp_path):
    lines = [line | ({"ema_val_loss": line["val_loss"] - 0.2} if "val_loss" in line else {}) for line in complete_run()]
    assert "EMA 2.772" in save_figure(make_run(lines), "loss", tmp_path / "loss.svg").read_text()


EXAMPLES = {"texts": 58, "truncated": 3, "left_out_without_a_loss": 2, "tokens_with_a_loss": 692, "padding": 81}


@pytest.mark.usefixtures("without_figures")
def test_what_became_of_examples_is_named(make_run):
    words = read_page(write_run_report(make_run([], summary={"examples": EXAMPLES | {"tokens": 1_647}}))).words
    assert "Truncated 3 of 60 texts, to a sequence Left out 2 of 60 texts, because no token has a loss" in words
    assert "Tokens with a loss 692 of 1,647 tokens to train on" in words
    assert "Padding 4.7% 81 tokens in the sequences to train on" in words


@pytest.mark.usefixtures("without_figures")
def test_examples_of_an_earlier_version_have_a_page(make_run):
    assert "Left out 2 of 60 texts" in read_page(write_run_report(make_run([], summary={"examples": EXAMPLES}))).words


NOT_LOWERED = (
    "Training has not lowered the held-out loss: it was 2.5000 before the first step, and 2.9471 in model/, the lowest "
    "held-out loss of its steps."
)


@pytest.mark.parametrize(("initial", "is_reported"), [(2.5, True), (3.5, False)])
@pytest.mark.usefixtures("without_figures")
def test_the_loss_before_the_first_step_is_where_the_curve_begins(make_run, initial, is_reported):
    lines = [validation(0, initial), *complete_run()]
    summary = SUMMARY | {"model_step": 40, "model_val_loss": 2.9471}
    words = read_page(write_run_report(make_run(lines, summary=summary))).words
    assert f"The loss on held-out text went from {initial:.2f} (step 0) to 2.97 nats per token" in words
    assert f"· {initial:.4f} before the first step" in words
    assert (NOT_LOWERED in words) == is_reported


@pytest.mark.usefixtures("without_figures")
def test_a_broken_loss_is_reported(make_run):
    lines = [training(1), training(2, loss=math.nan), training(3, loss=math.nan)]
    page = read_page(write_run_report(make_run(lines)))
    assert "not finite at step 2 and at 1 other step." in page.words


def guard(step: int, then: str, layer: str, operand: str) -> dict:
    fired = {
        "when": "flushed > 5%",
        "then": then,
        "since": step,
        "layer": layer,
        "product": "wgrad",
        "operand": operand,
    }
    return {"step": step, "guard": fired}


@pytest.mark.usefixtures("without_figures")
def test_guards_and_the_gemms_that_they_switched_are_reported(make_run):
    lines = [training(1), training(2), guard(2, "bf16", "a", "x"), guard(2, "bf16", "a", "dy"), training(3)]
    lines += [guard(3, "warn", "b", "x"), training(2), guard(2, "bf16", "a", "x"), guard(2, "bf16", "c", "x")]
    page = read_page(write_run_report(make_run(lines)))
    assert "Guards fired 2 times, first at step 2: flushed > 5% in wgrad of a." in page.words
    assert "computed in BF16: wgrad of a from step 3 on, wgrad of c from step 3 on." in page.words


STOP = {"step": 3, "stopped": "the loss is nan at step 3; the first non-finite value is in lm_head"}


@pytest.mark.usefixtures("without_figures")
def test_why_a_run_stopped_is_reported_first(make_run):
    lines = [training(1), training(2, skipped_for="a gradient is not finite"), STOP]
    page = read_page(write_run_report(make_run(lines)))
    assert f"Training stopped: {STOP['stopped']}. 1 step was skipped" in page.words


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("after", [[training(3)], [training(2), training(3), training(4)]], ids=len)
def test_a_stop_after_which_a_run_went_on_is_not_reported(make_run, after):
    page = read_page(write_run_report(make_run([training(1), training(2), STOP, *after])))
    assert "Training stopped" not in page.words


@pytest.mark.usefixtures("without_figures")
def test_unreadable_lines_are_reported(make_run):
    words = read_page(write_run_report(make_run('{"st', telemetry='{"step": 1\n{"step": 2}\n'))).words
    assert "1 line of metrics.jsonl could not be read and was left out here." in words
    assert "2 lines of telemetry.jsonl could not be read and were left out here." in words


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_figure_can_be_saved_as_a_file(make_run, tmp_path, suffix, magic):
    path = save_figure(make_run(complete_run()), "loss", tmp_path / f"loss.{suffix}")
    assert path.read_bytes().startswith(magic)


def test_an_unknown_figure_is_refused_with_the_known_ones(make_run, tmp_path):
    with pytest.raises(ValueError, match=r"loss, learning_rate.*'speed'"):
        save_figure(make_run([training(1)]), "speed", tmp_path / "a.png")


def test_a_figure_without_data_is_refused(make_run, tmp_path):
    with pytest.raises(ValueError, match="recorded no tile_scales"):
        save_figure(make_run([training(1)]), "tile_scales", tmp_path / "a.png")


def test_an_unknown_suffix_is_refused(make_run, tmp_path):
    with pytest.raises(ValueError, match=r"\.png or \.svg, not 'a\.gif'"):
        save_figure(make_run([training(1)]), "loss", tmp_path / "a.gif")


@pytest.mark.slow
def test_drawing_does_not_change_the_users_matplotlib_settings(make_run):
    import matplotlib

    with matplotlib.rc_context({"font.size": 17.0}):
        write_run_report(make_run([training(1)]))
        assert matplotlib.rcParams["font.size"] == 17.0


@pytest.mark.usefixtures("without_figures")
def test_values_that_change_during_the_run_are_drawn_and_named(make_run):
    batch, weight, speed = (2, 3, 4, 4), (0.3, 0.3, 0.1, 0.1), (0.001, 0.001, 0.001, 0.0)
    steps = [
        training(step, batch_size=b, mtp_loss_weight=w, balance_speed=s)
        for step, (b, w, s) in enumerate(zip(batch, weight, speed, strict=True), start=1)
    ]
    words = read_page(write_run_report(make_run(steps))).words
    assert "batch from 2 to 4 (last change at step 3)" in words
    assert "MTP weight from 0.3 to 0.1 (last change at step 3)" in words
    assert "γ from 0.001 to 0 (last change at step 4)" in words


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("depth", [0, 1])
def test_only_a_model_with_multi_token_prediction_has_its_curve(make_run, depth):
    config = {**CONFIG, "model": {"num_nextn_predict_layers": depth}}
    steps = [training(step, mtp_loss=0.0 if depth == 0 else 8.0) for step in (1, 2, 3)]
    words = read_page(write_run_report(make_run(steps, config=config))).words
    assert ("MTP is the loss of multi-token prediction" in words) == (depth == 1)


def many_experts(step):
    return experts(step, **{f"L{layer}": [100 + 3 * e for e in range(64)] for layer in range(3, 61)})


def test_the_texts_of_figures_do_not_touch(drawn):
    assert drawn[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "metrics",
    [[training(step, lr=0.0) for step in range(1, 30)], [training(1), many_experts(1), tile_scales(1)]],
    ids=["no learning rate", "many experts"],
)
def test_the_texts_of_figures_of_other_runs_do_not_touch(make_run, monkeypatch, metrics):
    found = faults_of_pages(monkeypatch)
    write_run_report(make_run(metrics))
    assert found == []


def test_zeros_have_no_sign(page):
    assert signed_zeros(page.words) == []


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("record", "title"),
    [
        (experts(1, L1=[0, 0, 0]), "Expert load"),
        (experts(1, L1=[0, 0, 0]), "Expert balance"),
        ({"step": 1, "tile_scales": {"x": {"log2": [], "count": []}}}, "Tile scales"),
        (training(1, grad_norm=0.0), "Gradient norm"),
        (training(1, lr=math.nan), "Learning rate"),
    ],
)
def test_a_figure_without_points_is_not_drawn(make_run, record, title):
    page = read_page(write_run_report(make_run([training(1, grad_norm=0.0, lr=math.nan), record])))
    assert title not in page.words


@pytest.mark.usefixtures("without_figures")
def test_idle_experts_are_reported_without_a_figure(make_run):
    page = read_page(write_run_report(make_run([training(1), experts(1, L1=[0, 0, 0])])))
    assert "No expert has received a token." in page.words


@pytest.mark.parametrize("loads", [[100, 100, 100, 100], [10, 390, 0, 0]])
def test_the_legend_of_expert_loads_is_the_same_for_every_run(make_run, monkeypatch, loads):
    monkeypatch.setattr(run_page, "FIGURES", {"expert_load": run_page.FIGURES["expert_load"]})
    page = read_page(write_run_report(make_run([training(1), experts(1, L1=loads)])))
    assert "0.4× or less" in page.words
    assert "2.5× or more" in page.words


def test_long_names_in_captions_are_broken_and_do_not_widen_the_page(page):
    rules = dict(re.findall(r"([^{};]+?) \{ ([^}]*)\}", page.styles))
    rules = {name.strip().split("\n")[-1]: rule for name, rule in rules.items()}
    assert "overflow-wrap: anywhere" in rules["figcaption"]
    assert "minmax(0, 1fr)" in rules["figure"]
