"""Claims about the loss that are registered before their runs: planned/README.md says why each has these numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One claim: recipes are compared with BF16 over pairs of a size and a design. Its jobs are NAME-RECIPE-SEED.

    Attributes:
        name: of its jobs, and of its section on the page.
        size: one of `experiments.loss.sizes.MODELS`.
        design: what differs from the usual configuration, one of `experiments.loss.jobs.DESIGNS`.
        recipes: that are compared with BF16, each in as many pairs.
        seeds: one pair each; none that was looked at before.
    """

    name: str
    size: str
    design: str
    recipes: tuple[str, ...]
    seeds: range

    @property
    def runs(self) -> list[tuple[str, int, str]]:
        """(recipe, seed, name of the job) of all runs, seed by seed."""
        recipes = ("bf16", *self.recipes)
        return [(recipe, seed, self.job_name(recipe, seed)) for seed in self.seeds for recipe in recipes]

    def job_name(self, recipe: str, seed: int) -> str:
        return f"{self.name}-{recipe}-{seed}"


PLANS = {
    plan.name: plan
    for plan in (
        Plan("planned-30m", "30m", "to-zero", ("deepseek_v3", "e5m2"), range(4, 28)),
        Plan("planned-30m-muon", "30m", "muon", ("deepseek_v3", "without_fprop"), range(4, 16)),
        Plan("planned-80m-muon", "80m", "muon", ("deepseek_v3",), range(12)),
        Plan("planned-150m", "150m", "to-zero", ("deepseek_v3",), range(2, 11)),
    )
}
