"""The calls of a rollout as conversations: a call goes on from the one whose tokens its prompt begins with.

A tree comes out: a root is a call that goes on from none, a leaf one from which none goes on, and a chain the way
from a root to a leaf. One conversation is one chain; a sub-agent or a compacted history makes several.
"""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.token_id_capture.records import TOKEN_FIELDS, TokenEntry, weights_of

__all__ = [
    "BuildNotes",
    "BuildOutput",
    "Chain",
    "ChainLink",
    "assert_prefix_contiguity",
    "per_request",
    "prefix_merging",
    "project_chain_to_output_items",
    "project_main_chain_response",
    "run_builder",
]

MAIN_CHAIN = "main"


@dataclass
class ChainLink:
    """A call in its chain."""

    entry: TokenEntry
    interstitial: list[int]
    """What its prompt adds to the tokens before it; for the first call nothing, since that is `root_prompt`."""


@dataclass
class Chain:
    """Calls that go on from each other."""

    chain_id: str
    links: list[ChainLink] = field(default_factory=list)
    root_prompt: list[int] = field(default_factory=list)

    def validate(self) -> None:
        """Check that every prompt is what came before it.

        Raises:
            ValueError: one is not.
        """
        seen = list(self.root_prompt)
        for link in self.links:
            seen += link.interstitial
            if link.entry.prompt_token_ids != seen:
                raise ValueError(
                    f"call {link.entry.model_call_id} does not go on from what chain {self.chain_id} holds"
                )
            seen += link.entry.generation_token_ids


@dataclass
class BuildNotes:
    """What is to be known about a build."""

    builder: str
    roots: int = 0
    chains: int = 0
    generated_tokens_captured: int = 0
    generated_tokens_delivered: int = 0
    """Those of the main chain."""
    delivered_fraction: float = 0.0
    unresolved_retries: list[str] = field(default_factory=list)
    """Calls with the same prompt of which nobody knows which the agent went on with."""
    empty_generation_calls: list[str] = field(default_factory=list)


@dataclass
class BuildOutput:
    """The chains, the main one first."""

    chains: list[Chain]
    quarantined: list[str] = field(default_factory=list)
    """Calls that could go on from several."""
    notes: BuildNotes = field(default_factory=lambda: BuildNotes(builder=""))


@dataclass
class _Node:
    """A call in the tree."""

    entry: TokenEntry
    prompt: bytes
    whole: bytes
    """Prompt and generation."""
    parent: "_Node | None" = None
    children: "list[_Node]" = field(default_factory=list)
    is_quarantined: bool = False


def per_request(entries: Sequence[TokenEntry]) -> BuildOutput:
    """A chain per call; for looking at calls, not for delivery."""
    said, empty = _with_tokens(entries)
    chains = [Chain(entry.model_call_id, [ChainLink(entry, [])], list(entry.prompt_token_ids)) for entry in said]
    notes = BuildNotes("per_request", roots=len(chains), chains=len(chains), empty_generation_calls=empty)
    captured = sum(len(entry.generation_token_ids) for entry in said)
    notes.generated_tokens_captured = notes.generated_tokens_delivered = captured
    notes.delivered_fraction = 1.0 if captured else 0.0
    return BuildOutput(chains, [], notes)


def prefix_merging(entries: Sequence[TokenEntry]) -> BuildOutput:
    """The chains of a rollout.

    Calls with the same prompt are tries of one: those that a later call goes on from are kept. If there is none, the
    first by id stands for all, and they are called unresolved.
    """
    said, empty = _with_tokens(entries)
    notes = BuildNotes("prefix_merging", empty_generation_calls=empty)
    nodes = [
        _node(entry) for entry in sorted(said, key=lambda entry: (len(entry.prompt_token_ids), entry.model_call_id))
    ]
    for index, node in enumerate(nodes):
        _find_parent(node, nodes[:index])
    roots = _without_lost_tries([node for node in nodes if node.parent is None], notes)
    for node in nodes:
        node.children = _without_lost_tries(node.children, notes)
    roots.sort(key=lambda node: (node.entry.created_at, node.entry.model_call_id))
    paths = [path for root in roots for path in _paths(root)]
    chains = [_chain(path, MAIN_CHAIN if not index else f"branch-{index}") for index, path in enumerate(paths)]
    notes.roots, notes.chains = len(roots), len(chains)
    notes.generated_tokens_captured = sum(len(entry.generation_token_ids) for entry in said)
    if chains:
        notes.generated_tokens_delivered = sum(len(link.entry.generation_token_ids) for link in chains[0].links)
        notes.delivered_fraction = notes.generated_tokens_delivered / notes.generated_tokens_captured
    return BuildOutput(chains, [node.entry.model_call_id for node in nodes if node.is_quarantined], notes)


_BUILDERS = {"prefix_merging": prefix_merging, "per_request": per_request}


def run_builder(entries: Sequence[TokenEntry], builder: str = "prefix_merging") -> BuildOutput:
    """The chains that the builder of that name makes.

    Raises:
        ValueError: there is none of that name, or a chain does not hold together.
    """
    if builder not in _BUILDERS:
        raise ValueError(f"there is no builder {builder!r}; these are known: {', '.join(_BUILDERS)}")
    out = _BUILDERS[builder](entries)
    for chain in out.chains:
        chain.validate()
    return out


def project_chain_to_output_items(chain: Chain) -> list[dict[str, Any]]:
    """The output items of a chain's calls; one item per call has all tokens before it and those of the call."""
    items: list[dict[str, Any]] = []
    for link in chain.links:
        entry = link.entry
        own = [dict(item) for item in entry.output_items] or [_bare_message(entry)]
        own[_token_item(entry, own)] |= {
            "prompt_token_ids": list(entry.prompt_token_ids),
            "generation_token_ids": list(entry.generation_token_ids),
            "generation_log_probs": list(entry.generation_log_probs),
            **({} if entry.routed_experts is None else {"routed_experts": entry.routed_experts}),
            **weights_of(entry.model_extra or {}),
        }
        items += own
    return items


def project_main_chain_response(rollout_id: str, out: BuildOutput, model: str = "") -> dict[str, Any]:
    """The response that the main chain amounts to.

    Raises:
        ValueError: there is no chain, or its items do not go on from each other; chains of single calls are refused.
    """
    if out.notes.builder == "per_request":
        raise ValueError("per_request makes no conversation that could be delivered; use prefix_merging")
    if not out.chains:
        raise ValueError("no chain could be built from the calls of the rollout")
    chain = out.chains[0]
    response = {
        "id": f"proj-{rollout_id}",
        "model": model or chain.links[-1].entry.model,
        "object": "response",
        "output": project_chain_to_output_items(chain),
        "usage": {
            "input_tokens": sum(len(link.entry.prompt_token_ids) for link in chain.links),
            "output_tokens": sum(len(link.entry.generation_token_ids) for link in chain.links),
        },
    }
    assert_prefix_contiguity(response)
    return response


def assert_prefix_contiguity(response: dict[str, Any]) -> None:
    """Check that each item with tokens goes on from all tokens before it.

    Raises:
        ValueError: one does not.
    """
    seen: list[int] = []
    for number, item in enumerate(response.get("output") or (), 1):
        if not item.get("generation_token_ids"):
            continue
        prompt = item["prompt_token_ids"]
        if prompt[: len(seen)] != seen:
            raise ValueError(f"output item {number} does not go on from the {len(seen)} tokens before it")
        seen = prompt + item["generation_token_ids"]


def _with_tokens(entries: Sequence[TokenEntry]) -> tuple[list[TokenEntry], list[str]]:
    said = [entry for entry in entries if entry.generation_token_ids]
    return said, [entry.model_call_id for entry in entries if not entry.generation_token_ids]


def _node(entry: TokenEntry) -> _Node:
    prompt = array("q", entry.prompt_token_ids).tobytes()
    return _Node(entry, prompt, prompt + array("q", entry.generation_token_ids).tobytes())


def _find_parent(node: _Node, earlier: Sequence[_Node]) -> None:
    """The earlier call with the longest tokens that the prompt begins with; two of them leave it in doubt."""
    candidates: list[_Node] = []
    for other in earlier:
        longest = len(candidates[0].whole) if candidates else 0
        if len(other.whole) >= longest and node.prompt.startswith(other.whole):
            candidates = [*candidates, other] if len(other.whole) == longest else [other]
    if len(candidates) > 1:
        node.is_quarantined = True
    if candidates:
        node.parent = candidates[0]
        for candidate in candidates:
            candidate.children.append(node)


def _without_lost_tries(siblings: Sequence[_Node], notes: BuildNotes) -> list[_Node]:
    by_prompt: dict[bytes, list[_Node]] = defaultdict(list)
    for node in siblings:
        by_prompt[node.prompt].append(node)
    kept: list[_Node] = []
    for tries in by_prompt.values():
        gone_on = [node for node in tries if node.children]
        if len(tries) > 1 and not gone_on:
            notes.unresolved_retries += sorted(node.entry.model_call_id for node in tries)
            gone_on = [min(tries, key=lambda node: node.entry.model_call_id)]
        kept += gone_on if len(tries) > 1 else tries
    return kept


def _paths(root: _Node) -> list[list[_Node]]:
    """Ways from the root to its leaves, without those that pass a call in doubt. Not recursive: chains are long."""
    paths, open_paths = [], [[root]]
    while open_paths:
        path = open_paths.pop()
        children = path[-1].children
        if not children:
            paths.append(path)
        open_paths += [[*path, child] for child in reversed(children) if not child.is_quarantined]
    return paths


def _chain(path: Sequence[_Node], chain_id: str) -> Chain:
    chain = Chain(chain_id, [], list(path[0].entry.prompt_token_ids))
    seen = len(chain.root_prompt)
    for node in path:
        entry = node.entry
        chain.links.append(ChainLink(entry, entry.prompt_token_ids[seen:]))
        seen = len(entry.prompt_token_ids) + len(entry.generation_token_ids)
    return chain


def _token_item(entry: TokenEntry, items: Sequence[dict[str, Any]]) -> int:
    if entry.token_item_index is not None:
        return entry.token_item_index
    inline = [index for index, item in enumerate(items) if any(item.get(name) is not None for name in TOKEN_FIELDS)]
    return inline[0] if inline else len(items) - 1


def _bare_message(entry: TokenEntry) -> dict[str, Any]:
    text = {"type": "output_text", "text": "", "annotations": []}
    return {
        "id": f"msg_{entry.model_call_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
