"""A generation as the Responses API writes it: as events, or in one piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import ApiError
from ..frontend import Serving
from ..generation import Generation, TextPiece
from ..http import named_event
from ..text.answer_parts import Tools
from ..text.tools import Content
from .answer_fields import cache_reports, chat_logprobs, written_to_cache
from .blocks import Block, BlockClosed, BlockEvent, BlockOpened, Blocks
from .conversation import answer_parser
from .response_request import ReasoningConfig, ResponsesRequest, TextConfig, is_json


class TextDelta(Struct):
    """The one event that comes with every token."""

    type: str
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Any]
    sequence_number: int


_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesWriter:
    """`top`: None without log-probabilities. `keep(id, response, output)` gets a response that has ended, as JSON,
    before its client can ask for it."""

    def __init__(
        self,
        serving: Serving,
        request: ResponsesRequest,
        generation: Generation,
        tools: Tools,
        top: int | None,
        keep: Callable[[str, bytes, bytes], None] | None,
    ) -> None:
        self.serving = serving
        self.request = request
        self.generation = generation
        self.top = top
        self.keep = keep
        self.hex = secrets.token_hex(16)
        self.id = f"resp_{self.hex}"
        self.created = int(time.time())
        self.status = "in_progress"
        parser = answer_parser(serving, generation, tools, request.chat_template_kwargs)
        self.blocks = Blocks(parser, serving.tool_parser)
        self.likely: dict[int, list[Any]] = {}  # block -> log-probabilities
        self._pending: list[Any] = []  # log-probabilities of tokens whose text is not final
        self._sequence = 0

    # ---- as a stream

    def opening(self) -> bytes:
        response = self._response()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: TextPiece) -> bytes:
        events = self.blocks.push(piece)
        if self.top is not None:
            self._score(piece, events, self.top)
        if self.blocks.full:
            piece = self.generation.cut(piece)
        if piece.finish is not None:
            self.status = "incomplete" if piece.finish == "length" else "completed"
            if not self.blocks.all:
                events += self.blocks.take(Content(""))
            events += self.blocks.close()
        return b"".join([self._block_event(event) for event in events])

    def closing(self) -> bytes:
        return self._event(f"response.{self.status}", response=self._over())

    def failed(self, error: ApiError) -> bytes:
        self.status = "failed"
        return self._event("response.failed", response=self._response(error))

    def _event(self, type: str, **fields: Any) -> bytes:
        event = named_event(type, {"type": type, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return event

    def _block_event(self, event: BlockEvent) -> bytes:
        block = event.block
        if isinstance(event, BlockOpened):
            return self._opened(block)
        if isinstance(event, BlockClosed):
            return self._closed(block)
        if block.kind == "text":
            return self._text(block, event.text)
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", **place, delta=event.text)
        return self._event("response.reasoning_text.delta", **place, content_index=0, delta=event.text)

    def _score(self, piece: TextPiece, events: Sequence[BlockEvent], top: int) -> None:
        """Log-probabilities go with the text that their tokens became. Those of tokens that became none, such as the
        marks of a call, are dropped."""
        if any(isinstance(event, BlockClosed) for event in events):
            self._pending = []
        self._pending += chat_logprobs(piece.tokens, piece.likely, top, self.serving.prompts.tokens)["content"]
        if events and events[-1].block.kind != "text":
            self._pending = []

    def _text(self, block: Block, text: str) -> bytes:
        likely, self._pending = self._pending, []
        if likely:
            self.likely.setdefault(block.index, []).extend(likely)
        type, number = "response.output_text.delta", self._sequence
        self._sequence += 1
        return named_event(type, TextDelta(type, self._item_id(block), block.index, 0, text, likely, number))

    def _opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress")
        if block.kind == "call":
            return self._event("response.output_item.added", output_index=block.index, item=item)
        (part,), item["content"] = item["content"], []
        place = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
        return self._event("response.output_item.added", output_index=block.index, item=item) + self._event(
            "response.content_part.added", **place, part=part
        )

    def _closed(self, block: Block) -> bytes:
        item = self._item(block, self._status_of(block))
        place = {"item_id": item["id"], "output_index": block.index}
        if block.kind == "call":
            done = self._event(
                "response.function_call_arguments.done", **place, name=block.name, arguments=item["arguments"]
            )
        else:
            place["content_index"] = 0
            part = self._part(block)
            if block.kind == "text":
                more = {"text": part["text"], "logprobs": part["logprobs"]}
                done = self._event("response.output_text.done", **place, **more)
            else:
                done = self._event("response.reasoning_text.done", **place, text=part["text"])
            done += self._event("response.content_part.done", **place, part=part)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    # ---- in one piece

    def whole(self) -> dict[str, Any]:
        return self._over()

    def _over(self) -> dict[str, Any]:
        """The response as it ends. Calls that were cut off are no part of a conversation that goes on."""
        response = self._response()
        if self.keep is not None:
            complete = [
                item for item in response["output"] if item["type"] != "function_call" or is_json(item["arguments"])
            ]
            self.keep(self.id, msgspec.json.encode(response), msgspec.json.encode(complete))
        return response

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.hex}_{block.index}"

    def _status_of(self, block: Block) -> str:
        """A response that ends too early has cut off its last item."""
        return "incomplete" if self.status != "completed" and block is self.blocks.all[-1] else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            named = {"call_id": block.call, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **named}
        content = [self._part(block)]
        if block.kind == "text":
            return {"type": "message", **item, "role": "assistant", "content": content}
        return {"type": "reasoning", **item, "summary": [], "content": content}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        likely = self.likely.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": likely}

    def _response(self, error: ApiError | None = None) -> dict[str, Any]:
        request, params = self.request, self.generation.params
        over = self.status in ("completed", "incomplete")
        text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
        response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "background": False,
            "error": None if error is None else {"code": _failure(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self.generation.model.name,
            "output": [self._item(block, self._status_of(block)) for block in self.blocks.all],
            "frequency_penalty": params.frequency_penalty,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": params.temperature,
            "text": {"format": _format(text.format), "verbosity": text.verbosity or "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if over else None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
        if over and request.cache_report:
            response["cache"] = cache_reports(self.serving, self.generation)[0]
        return response

    def _usage(self) -> dict[str, Any]:
        prompt, completion, cached = self.generation.usage
        written = written_to_cache(self.serving, self.request, self.generation)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.blocks.reasoning_tokens},
            "total_tokens": prompt + completion,
        }


def _failure(error: ApiError) -> str:
    """One of the few codes that the API has for errors."""
    return "invalid_prompt" if error.status == 400 else "rate_limit_exceeded" if error.status == 429 else "server_error"


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with all its fields: clients expect them."""
    given = {name: value for name, value in tool.items() if value is not None}
    return {"description": None, "parameters": None, "strict": False, **given}


def _format(form: dict[str, Any] | None) -> dict[str, Any]:
    if form is None or form["type"] != "json_schema":
        return form or {"type": "text"}
    return {"name": "response", "description": None, "strict": False, **form}
