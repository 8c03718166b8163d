"""The grammar of hybrid patterns: groups, stages, multi-token prediction, and errors that point at the place."""

from __future__ import annotations

import pytest

from lamella_megatron._model.patterns import LayerGroup, Pattern, parse_pattern


def _group(symbols: str, first: int) -> LayerGroup:
    return LayerGroup(symbols, first, is_group=True)


def _layer(symbol: str, first: int) -> LayerGroup:
    return LayerGroup(symbol, first, is_group=False)


@pytest.mark.parametrize(
    ("text", "expected", "flat"),
    [
        ("[*-]", Pattern(((_group("*-", 0),),)), "*-"),
        ("M[M*]-", Pattern(((_layer("M", 0), _group("M*", 1), _layer("-", 3)),)), "MM*-"),
        ("[*E][*E]", Pattern(((_group("*E", 0), _group("*E", 2)),)), "*E*E"),
        (
            "M[M*]-|[*-]/*E/*E",
            Pattern(((_layer("M", 0), _group("M*", 1), _layer("-", 3)), (_group("*-", 4),)), "*E", 2),
            "MM*-|*-/*E/*E",
        ),
        ("[-*]", Pattern(((_group("-*", 0),),)), "-*"),
        ("|M", Pattern(((), (_layer("M", 0),))), "|M"),
        ("M||M", Pattern(((_layer("M", 0),), (), (_layer("M", 1),))), "M||M"),
        ("*E|/*E", Pattern(((_layer("*", 0), _layer("E", 1)), ()), "*E", 1), "*E|/*E"),
        ("", Pattern(((),)), ""),
        ("M/", Pattern(((_layer("M", 0),),)), "M"),
        ("[+E]G/D", Pattern(((_group("+E", 0), _layer("G", 2)),), "D", 1), "+EG/D"),
    ],
)
def test_a_pattern_is_taken_apart(text: str, expected: Pattern, flat: str) -> None:
    pattern = parse_pattern(text)
    assert pattern == expected
    assert pattern.flat == flat
    assert [number for group in pattern.groups for number in group.layers] == list(range(len(pattern.symbols)))


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("[[*-]]", 1, "groups do not contain groups, got '\\['"),
        ("M[]", 2, "a layer in the group, got ']'"),
        ("M[*-", 4, "a group lies in one stage, got the end"),
        ("M*]-", 2, "no group is open, got ']'"),
        ("[*|-]", 2, "a group lies in one stage, got '\\|'"),
        ("M/[*E]", 2, "neither groups nor stages, got '\\['"),
        ("M/*|E", 3, "neither groups nor stages, got '\\|'"),
        ("[E*]", 1, "experts at the end of their group, .* got 'E'"),
        ("M[*E-]", 3, "experts at the end of their group, .* got 'E'"),
        ("M/*E/*", 5, "the first depth again \\('\\*E'\\)"),
        ("M//*E", 2, "the first depth again"),
        ("*D", 1, "no other kind of attention beside '\\*', .* got 'D'"),
        ("[*E]+", 4, "no other kind of attention beside '\\*', .* got '\\+'"),
        ("M/*D", 3, "no other kind of attention beside '\\*', .* got 'D'"),
        ("MXE", 1, "one of \\[.*\\], .* got 'X'"),
    ],
)
def test_an_error_points_at_the_place(text: str, at: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}.* at position {at} of the pattern"):
        parse_pattern(text)
