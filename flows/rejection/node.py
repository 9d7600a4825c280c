"""Steps of rejection sampling: answers and scores in shards that the run's datastore keeps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from metaflow import current

from decorators.storage import datastore, origin_run_ids
from estimator.inference.generation import CPU_BATCH_TOKENS, CPU_SEQUENCES
from estimator.plan import Plan
from estimator.terminal import print
from flows.finetune import scorers
from launchers.dataset import render
from launchers.dataset.preferences import Sample
from launchers.dataset.prompts import Prompt, prompts_of
from launchers.dataset.rows import Conversation
from launchers.rejection import answers as rows
from launchers.rejection import generation, scoring
from launchers.rejection.answers import Answers, BatchLimit, Scores
from launchers.scoring.functions import scorer_of
from launchers.settings import Settings
from launchers.store.bundles import sha256_of


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A stage's result: shards of rows in the run's datastore."""

    key: str  # of their folder
    count: int

    def fetch(self, folder: Path) -> list[Path]:
        """Download the shards into a folder of this machine; return their files in order."""
        folder.mkdir(parents=True, exist_ok=True)
        store = datastore()
        files = [folder / rows.shard_name(shard) for shard in range(self.count)]
        for file in files:
            if not file.is_file():
                store.get_file(f"{self.key}/{file.name}", file)
        return files

    def answers(self, folder: Path) -> list[Answers]:
        """Return the answers in the shards."""
        return [item for file in self.fetch(folder) for item in rows.read_answers(file)]

    def scores(self, folder: Path) -> list[Scores]:
        """Return the scores in the shards."""
        return [item for file in self.fetch(folder) for item in rows.read_scores(file)]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Generated answers of one node, or of all nodes together."""

    shards: Shards  # of all nodes
    prompts: int
    answers: int
    tokens: int
    cut: int  # answers truncated at the maximum length
    assigned: int  # shards assigned to the node
    reused: int  # of these, shards left by an earlier attempt or by the run that was resumed
    tokens_per_second: float | None  # of this attempt, including model loading; None: no shard was missing

    def facts(self) -> list[tuple[str, str]]:
        """Return rows of (name, value) for display."""
        speed = "unknown" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}"
        return [
            ("prompts", f"{self.prompts:,}"),
            ("answers", f"{self.answers:,}, {self.cut:,} of them truncated at the maximum length"),
            ("tokens generated", f"{self.tokens:,}"),
            ("tokens/s, loading included", speed),
            ("shards", f"{self.assigned}, {self.reused} of them reused from an earlier attempt"),
        ]


def gather(parts: Sequence[Drawn]) -> Drawn:
    """Combine the answers of all nodes."""
    speeds = [part.tokens_per_second for part in parts if part.tokens_per_second is not None]
    return dataclasses.replace(
        parts[0],
        prompts=sum(part.prompts for part in parts),
        answers=sum(part.answers for part in parts),
        tokens=sum(part.tokens for part in parts),
        cut=sum(part.cut for part in parts),
        assigned=parts[0].shards.count,
        reused=sum(part.reused for part in parts),
        tokens_per_second=sum(speeds) if speeds else None,
    )


def prepare_prompts(samples: Sequence[Sample], settings: Settings, model_dir: Path) -> list[Prompt]:
    """Return the prompts of the first rows, up to the number in the settings."""
    tokenizer = render.load_tokenizer(model_dir, settings)
    conversations = (sample for sample in samples if isinstance(sample, Conversation))
    return list(prompts_of(itertools.islice(conversations, settings.rejection.prompts), tokenizer))


def draw(
    name: str,
    prompts: Sequence[Prompt],
    *,
    plan: Plan,
    settings: Settings,
    base_dir: Path,
    model_dir: Path,
    model_name: str,
    work_dir: Path,
    node: int = 0,
    nodes: int = 1,
) -> Drawn:
    """Generate a node's missing answers, which no earlier attempt and no resumed run has generated.

    Parameters
    ----------
    name:
    Name of this stage within the run.
    model_dir, model_name:
        The model that generates, or an adapter of the one in ``base_dir``; and its unique name.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    rows.write_rows(work_dir / "prompts.jsonl", prompts)
    request = generation.GenerationRequest(
        base_dir=base_dir,
        model_dir=model_dir,
        prompts=work_dir / "prompts.jsonl",
        work_dir=work_dir / "generation",
        shards_dir=work_dir / "answers",
        settings=settings,
        device=plan.layout.device,
        limit=batch_limit(plan),
        gpus=_gpus(plan),
        memory_bytes=plan.prediction.memory.capacity_bytes if plan.layout.device == "cuda" else None,
        node=node,
        nodes=nodes,
    )
    sampling = settings.rejection.model_dump(mode="json", include={*_SAMPLING})
    answers_key = rows.fingerprint(
        model_name,
        sampling,
        settings.seed,
        plan.layout.device,
        rows.SHARD_ANSWERS,
        dataclasses.asdict(request.limit),
        sha256_of(request.prompts),
    )
    own_shards, count = request.shards(), request.count()
    shard_store = _ShardStore(
        f"{name}-{answers_key}", tuple(own_shards), count, request.shards_dir, "answers"
    )
    start = time.monotonic()
    generation.generate(request, shard_store.store)
    seconds = time.monotonic() - start
    drawn = {shard: answers_in(request.shards_dir, [shard]) for shard in own_shards}
    generated = [answer for items in drawn.values() for answers in items for answer in answers.answers]
    new_tokens = [
        answer.tokens
        for shard in shard_store.new_shards
        for items in drawn[shard]
        for answer in items.answers
    ]
    return Drawn(
        shards=Shards(key=shard_store.key, count=count),
        prompts=sum(map(len, own_shards.values())),
        answers=len(generated),
        tokens=sum(answer.tokens for answer in generated),
        cut=sum(not answer.ended for answer in generated),
        assigned=len(own_shards),
        reused=len(own_shards) - len(shard_store.new_shards),
        tokens_per_second=sum(new_tokens) / seconds if new_tokens else None,
    )


def answers_in(folder: Path, shards: Iterable[int]) -> list[Answers]:
    """Read the answers of these shards from a folder."""
    return [item for shard in shards for item in rows.read_answers(folder / rows.shard_name(shard))]


def drawing_nodes(plan: Plan) -> list[int]:
    """Return the indexes of the nodes that generate answers; one node if the plan has no generation."""
    stage = plan.generation.stage("generate") if plan.generation is not None else None
    return list(range(stage.nodes if stage is not None else 1))


def batch_limit(plan: Plan) -> BatchLimit:
    """Return the size of a generation batch by the plan; about a shard if the plan has none."""
    planned = plan.generation
    if planned is None:
        return BatchLimit(sequences=CPU_SEQUENCES, tokens=CPU_BATCH_TOKENS)
    return BatchLimit(sequences=planned.batch_sequences, tokens=planned.batch_tokens)


def _gpus(plan: Plan) -> int:
    """Return the number of GPUs per copy of the model; 0 on a CPU."""
    stage = plan.generation.stage("generate") if plan.generation is not None else None
    return (plan.request if stage is None else stage.request).gpus_per_node


# Settings that determine the answers
_SAMPLING = ("answers", "temperature", "top_p", "max_new_tokens", "generator")


def score(
    name: str,
    prompts: Sequence[Prompt],
    drawn: Drawn,
    *,
    plan: Plan,
    settings: Settings,
    reward_model: str | None,
    work_dir: Path,
) -> Shards:
    """Score the answers that are not scored yet. ``reward_model``: see flows/finetune/scorers.py."""
    work_dir.mkdir(parents=True, exist_ok=True)
    rows.write_rows(work_dir / "prompts.jsonl", prompts)
    drawn.shards.fetch(work_dir / "answers")
    function = settings.rejection.score or ""
    scorer_file = scorers.fetch_scorer(function, reward_model, work_dir)
    identity = reward_model or function
    if reward_model is None and (file := scorer_of(scorer_file).file) is not None:
        identity = f"{scorer_of(scorer_file).function} {sha256_of(Path(file))}"
    request = scoring.ScoringRequest(
        score=function,
        function=None if reward_model else scorer_file,
        model_dir=Path(scorer_file) if reward_model else None,
        prompts=work_dir / "prompts.jsonl",
        answers_dir=work_dir / "answers",
        shards_dir=work_dir / "scores",
        shards=drawn.shards.count,
        work_dir=work_dir / "scoring",
        settings=settings,
        device=plan.layout.device,
    )
    scores_key = rows.fingerprint(identity, drawn.shards.key)
    count = drawn.shards.count
    shard_store = _ShardStore(f"{name}-{scores_key}", range(count), count, request.shards_dir, "scores")
    scoring.score(request, shard_store.store)
    return Shards(key=shard_store.key, count=count)


class _ShardStore:
    """Stores finished shards in the run's datastore; on creation fetches those that are stored already.

    ``shards``: indexes of this node's shards, among ``count`` of all nodes.
    """

    def __init__(self, name: str, shards: Sequence[int], count: int, folder: Path, content: str) -> None:
        self.key = f"rejection/{current.run_id}/{name}"
        self.new_shards: list[int] = []
        self._store, self._count, self._what = datastore(), count, content
        folder.mkdir(parents=True, exist_ok=True)
        fetched = sum(self._fetch(name, folder / rows.shard_name(shard)) for shard in shards)
        if fetched:
            print(f"{content}: {fetched} of {len(shards)} shards exist already", flush=True)

    def _fetch(self, name: str, file: Path) -> bool:
        """Fetch a shard of this run or of a run that it was resumed from; return whether it exists."""
        for run in (current.run_id, *origin_run_ids()):
            key = f"rejection/{run}/{name}/{file.name}"
            if self._store.size(key) is not None:
                temporary = file.with_suffix(".fetched")
                self._store.get_file(key, temporary)
                temporary.replace(file)
                if run != current.run_id:
                    self._store.put_file(f"{self.key}/{file.name}", file)
                return True
        return False

    def store(self, shard: int, file: Path) -> None:
        """Store a finished shard in the datastore."""
        self._store.put_file(f"{self.key}/{file.name}", file)
        self.new_shards.append(shard)
        print(f"{self._what}: shard {shard + 1} of {self._count} is finished", flush=True)
