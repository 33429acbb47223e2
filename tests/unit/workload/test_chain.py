"""Tests of chained block hashes."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.workload._chain import MAX_ID, IdChain, SectionChain, root_hash

Sections = list[tuple[bytes, int, int]]

# Lengths belong to ids, as in a table of sections.
LENGTHS = {(b"a", 0): 5, (b"a", 1): 16, (b"b", 0): 3, (b"b", 1): 40, (b"b", 2): 0}
sections_strategy = st.lists(
    st.sampled_from([(kind, ident, tokens) for (kind, ident), tokens in LENGTHS.items()]),
    max_size=6,
)


def section_hashes(sections: Sections, block_tokens: int = 8) -> tuple[bytes, ...]:
    """Return the hashes of a prompt made of sections."""
    chain = SectionChain(root_hash("test"), block_tokens)
    for section in sections:
        chain.append(*section)
    return chain.block_hashes()


def token_blocks(sections: Sections, block_tokens: int = 8) -> list[tuple[object, ...]]:
    """Return the token stream itself, cut into blocks."""
    stream = [(kind, ident, number) for kind, ident, tokens in sections for number in range(tokens)]
    return [
        tuple(stream[start : start + block_tokens]) for start in range(0, len(stream), block_tokens)
    ]


def common_prefix(left: list[object], right: list[object]) -> int:
    """Return how many elements two lists have in common at the front."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_scopes_are_separate() -> None:
    """Different scopes have different roots, however their parts are cut."""
    roots = {root_hash("a", "bc"), root_hash("ab", "c"), root_hash("abc"), root_hash("a", "b", "c")}
    assert len(roots) == 4
    assert root_hash("a", "bc") == root_hash("a", "bc")


def test_equal_ids_share_hashes_up_to_the_first_difference() -> None:
    """Hashes of two requests agree exactly as far as their ids do."""
    chain = IdChain(root_hash("test"))
    left, right = chain.hashes([1, 2, 3, 4]), chain.hashes([1, 2, 9, 4])
    assert left[:2] == right[:2]
    assert not set(left[2:]) & set(right[2:])


def test_id_with_two_parents_becomes_two_hashes() -> None:
    """One hash has one parent even where the file's ids do not."""
    chain = IdChain(root_hash("test"))
    first, second = chain.hashes([1, 7]), chain.hashes([2, 7])
    assert first[1] != second[1]
    assert chain.hashes([1, 7]) == first
    assert chain.hashes([2, 7]) == second


def test_id_hashes_have_fixed_values() -> None:
    """Hashes are part of recorded results: they stay what they are in every process."""
    found = IdChain(root_hash("test")).hashes([0, MAX_ID])
    assert [block_hash.hex()[:16] for block_hash in found] == [
        "5548dba275437d69",
        "8c7c500230cb1fb8",
    ]


def test_tail_belongs_to_its_label_and_prefix() -> None:
    """The hash of a last block without an id depends on what precedes it and on its owner."""
    chain = IdChain(root_hash("test"))
    prefix, other = chain.hashes([1]), chain.hashes([2])
    tails = {chain.tail(prefix, "x"), chain.tail(prefix, "y"), chain.tail(other, "x")}
    tails |= {chain.tail([], "x")}
    assert len(tails) == 4


@given(left=sections_strategy, right=sections_strategy)
@settings(max_examples=200, deadline=None)
def test_sections_share_hashes_exactly_where_token_streams_agree(
    left: Sections, right: Sections
) -> None:
    """Equal prefixes of the token streams, and only those, have equal hashes."""
    expected = common_prefix(list(token_blocks(left)), list(token_blocks(right)))
    assert common_prefix(list(section_hashes(left)), list(section_hashes(right))) == expected


@given(sections=sections_strategy, block_tokens=st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_sections_have_one_hash_a_block(sections: Sections, block_tokens: int) -> None:
    """The number of hashes is the number of blocks, the partial last one included."""
    tokens = sum(section[2] for section in sections)
    assert len(section_hashes(sections, block_tokens)) == -(-tokens // block_tokens)


def test_empty_section_adds_nothing() -> None:
    """A section of no tokens is invisible."""
    assert section_hashes([(b"a", 1, 16), (b"b", 2, 0)]) == section_hashes([(b"a", 1, 16)])


def test_growing_prompt_keeps_its_full_blocks() -> None:
    """What is appended later changes the partial last block and no other."""
    chain = SectionChain(root_hash("test"), 8)
    chain.append(b"a", 1, 20)
    before = chain.block_hashes()
    assert chain.block_hashes() == before
    chain.append(b"b", 1, 20)
    after = chain.block_hashes()
    assert after[:2] == before[:2]
    assert after[2] != before[2]
    assert chain.num_tokens == 40


@pytest.mark.parametrize("block_tokens", [1, 7, 8, 64])
def test_partial_block_differs_from_the_full_one(block_tokens: int) -> None:
    """A block that is one token short is another block."""
    full = section_hashes([(b"a", 1, 2 * block_tokens)], block_tokens)
    short = section_hashes([(b"a", 1, 2 * block_tokens - 1)], block_tokens)
    assert short[:1] == full[:1]
    assert short[1:] != full[1:]
