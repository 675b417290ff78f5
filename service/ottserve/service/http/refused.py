"""Fields of OpenAI's that are refused by name, each with the values that ask for nothing and so may stand there."""

from __future__ import annotations

from collections.abc import Mapping

NotServed = Mapping[str, tuple[object, ...]]

COMPLETION: NotServed = {"best_of": (1,), "suffix": ("",)}
CHAT: NotServed = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
MESSAGE: NotServed = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
NAMED_SCHEMA: NotServed = {"description": ("",)}
STREAM_OPTIONS: NotServed = {"include_obfuscation": (False,)}
