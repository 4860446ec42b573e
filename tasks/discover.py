"""The discover node of a night: what is new, and what the night trains on."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.trainer.config_nightly import NightlyConfig
from tasks.trainer.nightly.home import Discovery, Home


@task(name="discover", cache_policy=NO_CACHE)
def discover(config: NightlyConfig, home: Home) -> Discovery:
    """Continue the night that was killed, or plan a new one, or find nothing to do."""
    # Not above: it reads the target's tokenizer, and a worker that only draws the form must not pay for that.
    from tasks.trainer.nightly.plan import discover as discover_night

    return discover_night(config, home)
