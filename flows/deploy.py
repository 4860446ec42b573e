"""Puts the work pool, the automations and the deployments on a Prefect server: `eyas deploy`.

Everything lies in two files, deploy/prefect.yaml and deploy/automations.yaml; `prefect deploy` reads the first. What
it cannot do is done here: values of a recipe with every default written out, as two steps that prefect.yaml names, and
automations that stay single when they are applied again. A pool that is there already is left as it is, for its limit
and its job template are the platform's.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Literal

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from tasks.trainer.config_nightly import read_nightly
from tasks.trainer.config_states import nearest
from tasks.trainer.errors import InputError
from tasks.trainer.recipe import read_config

HOME = Path(__file__).parent.parent
"""The checkout that holds deploy/ and flows/."""
DEPLOYMENTS = HOME / "deploy" / "prefect.yaml"
AUTOMATIONS = HOME / "deploy" / "automations.yaml"
KUBERNETES = HOME / "deploy" / "kubernetes.yaml"
RECIPES = Path(__file__).parent / "recipes"
POOL = "gpu"
PoolType = Literal["process", "kubernetes"]
NOTIFY_BLOCK = "EYAS_NOTIFY_BLOCK"


def recipe_path(name: str) -> str:
    """A recipe's path: of one that comes with Eyas, or the path itself. Raises InputError when it is neither."""
    ours = {path.stem: path for path in RECIPES.glob("*.yaml")}
    if name in ours:
        return str(ours[name])
    if not Path(name).is_file():
        raise InputError(f"there is no recipe {name!r}{nearest(name, ours)}; or give the path of a file")
    return name


def recipe(recipe: str, run_dir: str, set: list[str] | None = None) -> dict[str, Any]:
    """Step of prefect.yaml: a recipe's groups, with every default written out.

    run_dir may hold {identity}, which is for each run to fill. Raises InputError as `eyas config` does.
    """
    config = read_config(recipe_path(recipe), set or [])
    return {**config.model_dump(mode="json"), "run_dir": run_dir}


def nightly_recipe(recipe: str, home: str, set: list[str] | None = None) -> dict[str, Any]:
    """Step of prefect.yaml: as `recipe`, with the nightly group, for nightly-retrain. Raises InputError."""
    dumped: dict[str, Any] = read_nightly(recipe_path(recipe), set or [], home=home).model_dump(mode="json")
    return dumped


def version() -> dict[str, str]:
    """Step of prefect.yaml: `version`, an image's EYAS_VERSION, else git's in a checkout, or the package's."""
    if os.environ.get("EYAS_VERSION"):
        return {"version": os.environ["EYAS_VERSION"]}
    git = ["git", "-C", str(HOME), "describe", "--always", "--dirty", "--tags"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return {"version": package_version("eyas")}
    return {"version": done.stdout.strip() or package_version("eyas")}


def environment() -> dict[str, str]:
    """What prefect.yaml names, at its defaults where the environment says nothing."""
    workdir = os.environ.get("EYAS_WORKDIR", os.getcwd())
    defaults = {
        "EYAS_HOME": str(HOME),
        "EYAS_WORKDIR": workdir,
        "EYAS_DATA": "conversations.jsonl",
        "EYAS_HELDOUT": "heldout.jsonl",
        "EYAS_STORE": "runs/store",
        "EYAS_RUNS": "runs",
    }
    return {**defaults, **os.environ}


def deploy(
    *, pool_type: PoolType = "process", pool_limit: int | None = None, deployments: Path = DEPLOYMENTS
) -> Iterator[str]:
    """Apply everything to the server at PREFECT_API_URL; yields a line for each thing that was done.

    pool_type: of a new pool; kubernetes takes deploy/kubernetes.yaml as its job template, and renews that of its pool.
    pool_limit: runs at once in the pool; None leaves a pool that is there as it is, and gives a new one the limit 1,
    for a GPU runs one. Raises InputError when a file is missing or wrong.
    """
    for path in (deployments, AUTOMATIONS):
        if not path.is_file():
            raise InputError(f"{str(path)!r} is not there; `eyas deploy` needs a checkout of Eyas, installed editable")
    yield asyncio.run(_apply_pool(pool_type, pool_limit))
    yield from asyncio.run(_apply_automations(automations_of(AUTOMATIONS)))
    # Relative paths of the file are relative to it, and so is its module entrypoint's import.
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file", str(deployments), "--all"],
        capture_output=True,
        text=True,
        check=False,
        env={**environment(), "PYTHONPATH": os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")]))},
    )
    if done.returncode != 0:
        raise InputError(f"prefect deploy refused {str(deployments)!r}:\n{(done.stdout + done.stderr)[-3000:]}")
    for entry in yaml.safe_load(deployments.read_text(encoding="utf-8"))["deployments"]:
        yield f"deployment {entry['name']}"


def automations_of(path: Path) -> list[dict[str, Any]]:
    """The automations of a file, as Prefect's own schema has them. Raises InputError when one is not."""
    automations: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["automations"]
    for automation in automations:
        try:
            AutomationCore.model_validate(_with_block(automation, "00000000-0000-0000-0000-000000000000"))
        except ValidationError as error:
            raise InputError(f"{path.name}: automation {automation.get('name')!r}: {error}") from None
    return automations


def job_template(pool_type: PoolType) -> dict[str, Any]:
    """The base job template of a pool."""
    if pool_type == "process":
        return ProcessWorker.get_default_base_job_template()
    template: dict[str, Any] = yaml.safe_load(KUBERNETES.read_text(encoding="utf-8"))
    return template


async def _apply_pool(kind: PoolType, limit: int | None) -> str:
    async with get_client() as client:
        try:
            pool = await client.read_work_pool(POOL)
        except ObjectNotFound:
            wanted = WorkPoolCreate(
                name=POOL,
                type=kind,
                description="Workers with a GPU. The limit is of runs at once over all workers.",
                base_job_template=job_template(kind),
                concurrency_limit=limit or 1,
            )
            await client.create_work_pool(wanted)
            return f"work pool {POOL}: made, type {kind}, {limit or 1} run(s) at once"
        if pool.type != kind:
            raise InputError(f"work pool {POOL!r} is of type {pool.type}, not {kind}; say --pool-type {pool.type}")
        changes: dict[str, Any] = {}
        if limit is not None and pool.concurrency_limit != limit:
            changes["concurrency_limit"] = limit
        if kind == "kubernetes" and pool.base_job_template != job_template(kind):
            changes["base_job_template"] = job_template(kind)
        if changes:
            await client.update_work_pool(POOL, WorkPoolUpdate(**changes))
        limit = limit or pool.concurrency_limit
        done = f"{', '.join(changes)} changed" if changes else "as it is"
        return f"work pool {POOL}: {done}, type {kind}, {limit or 'any number of'} run(s) at once"


async def _apply_automations(automations: list[dict[str, Any]]) -> list[str]:
    slug = os.environ.get(NOTIFY_BLOCK, "")
    lines = []
    async with get_client() as client:
        block = await _block_id(client, slug) if slug else None
        for automation in automations:
            name = automation["name"]
            if block is None and _needs_block(automation):
                lines.append(f"automation {name}: left out, {NOTIFY_BLOCK} is empty")
                continue
            wanted = AutomationCore.model_validate(_with_block(automation, block))
            found = await client.read_automations_by_name(name)
            for extra in found[1:]:
                await client.delete_automation(extra.id)
            if not found:
                await client.create_automation(wanted)
                lines.append(f"automation {name}: made")
            elif _comparable(found[0]) != _comparable(wanted):
                await client.update_automation(found[0].id, wanted)
                lines.append(f"automation {name}: changed")
            else:
                lines.append(f"automation {name}: as it is")
    return lines


async def _block_id(client: PrefectClient, slug: str) -> str:
    kind, _, name = slug.partition("/")
    try:
        return str((await client.read_block_document_by_name(name, kind)).id)
    except ObjectNotFound:
        raise InputError(
            f"{NOTIFY_BLOCK}={slug!r}: the server has no such block; make it in the UI under Blocks, and write it as "
            "TYPE/NAME, for example slack-webhook/eyas"
        ) from None


def _needs_block(automation: Mapping[str, Any]) -> bool:
    return any(action.get("block_document_id") == f"${NOTIFY_BLOCK}" for action in automation["actions"])


def _with_block(automation: Mapping[str, Any], block: str | None) -> dict[str, Any]:
    actions = [
        {**action, "block_document_id": block} if action.get("block_document_id") == f"${NOTIFY_BLOCK}" else action
        for action in automation["actions"]
    ]
    return {**automation, "actions": actions}


def _comparable(automation: AutomationCore) -> dict[str, Any]:
    """What the file decides; the server adds ids and times."""
    return automation.model_dump(mode="json", include=set(AutomationCore.model_fields) - {"id", "owner_resource"})
