"""What a request asks of sampling: names and defaults are vLLM's, everything is checked when made. No torch here: the
API process makes these too."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sapwood.cache import Namespace, whole_number

Likely = dict[int, tuple[float, int]]  # token -> log-probability, and its rank from 1
GREEDY = 1e-5  # temperatures below take the likeliest token
MOST_LOGPROBS = 1024  # that any engine tells of a token; each says itself how many it does
MOST_STOPS = 32  # strings, and as many tokens
MOST_STOP_LENGTH = 1024  # characters
MOST_BAD_WORDS = 1024
MOST_BAD_WORD_TOKENS = 8
_MOST = 2**31 - 1
_SWITCHES = (
    *("ignore_eos", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when that ends.

    n                  samples of one prompt, which is computed once
    presence_penalty   taken off the logit of every token generated so far,
    frequency_penalty  and so much more for each time it was
    repetition_penalty logits of tokens in the prompt or generated so far: positive ones are divided by it, others
                       multiplied
    temperature        logits are divided by it; 0: the likeliest token is taken
    top_p              the likeliest tokens that together have this probability; those as likely as the last of them too
    top_k              the k likeliest tokens; 0 or -1: all
    min_p              tokens at least so likely, as a part of the likeliest one's probability
    seed               makes the choice repeatable, in any company; None or -1: a random one
    stop               strings that end the text, before them unless `include_stop_str_in_output`
    stop_token_ids     tokens that end it
    bad_words          words that are not generated
    ignore_eos         the model's end-of-text tokens end nothing
    max_tokens         None: what the context leaves
    min_tokens         nothing stops it before: eos and `stop_token_ids` are not chosen, `stop` is not looked for
    logprobs           log-probabilities of the token chosen and of so many of the likeliest, before anything below was
                       applied to the logits
    prompt_logprobs    the same for the tokens of the prompt
    detokenize         False: no text is made
    spaces_between_special_tokens
                       for scripts that set it: the tokenizers used here put none
    logit_bias         token -> what is added to its logit
    allowed_token_ids  no other tokens are chosen
    cache_salt         requests with different ones share nothing of the cache
    priority           lower is more urgent
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        whole_number("n", self.n, 1, 16384)
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._number("repetition_penalty", 0.01, 100)
        self._number("temperature", 0, 100)
        self._number("top_p", 0, 1)
        if not self.top_p:
            raise ValueError(f"top_p must be a number above 0 and at most 1, got {self.top_p}")
        whole_number("top_k", self.top_k, -1, _MOST)
        self._number("min_p", 0, 1)
        if self.seed is not None:
            whole_number("seed", self.seed, -(2**63), 2**63 - 1)
            if self.seed == -1:
                object.__setattr__(self, "seed", None)
        self._strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop, MOST_STOPS)
        self._strings("bad_words", self.bad_words, MOST_BAD_WORDS)
        self._tokens("stop_token_ids", MOST_STOPS)
        self._tokens("allowed_token_ids", 1 << 20)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must be None or name at least one token, got none")
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens, 1, _MOST)
        whole_number("min_tokens", self.min_tokens, 0, _MOST if self.max_tokens is None else self.max_tokens)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                whole_number(field, getattr(self, field), 0, MOST_LOGPROBS)
        for field in _SWITCHES:
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False, got {getattr(self, field)!r:.60}")
        if self.stop and not self.detokenize:
            raise ValueError(f"detokenize must be True where stop strings are looked for, got stop={self.stop!r:.60}")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        try:
            Namespace(salt=self.cache_salt)
        except ValueError as error:
            raise ValueError(f"cache_{error}") from None
        whole_number("priority", self.priority, -_MOST, _MOST)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop`, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def check_vocabulary(self, vocabulary: int) -> None:
        """ValueError if a token named here is none of the model's."""
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            most = max(getattr(self, field) or (0,))
            if most >= vocabulary:
                raise ValueError(f"{field} must name tokens from 0 to {vocabulary - 1} for this model, got {most}")

    def _number(self, field: str, low: float, high: float) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"{field} must be a number from {low} to {high}, got {value!r:.60}")
        object.__setattr__(self, field, float(value))

    def _strings(self, field: str, strings: object, most: int) -> None:
        if strings is None:
            return
        if not isinstance(strings, (list, tuple)) or len(strings) > most:
            raise ValueError(f"{field} must be a list of at most {most} strings, got {getattr(self, field)!r:.60}")
        for string in strings:
            if not isinstance(string, str) or not 0 < len(string) <= MOST_STOP_LENGTH:
                raise ValueError(f"{field} must hold strings of 1 to {MOST_STOP_LENGTH} characters, got {string!r:.60}")
        object.__setattr__(self, field, tuple(strings))

    def _tokens(self, field: str, most: int) -> None:
        tokens = getattr(self, field)
        if tokens is None:
            return
        if isinstance(tokens, (str, bytes, Mapping)) or not hasattr(tokens, "__len__") or len(tokens) > most:
            raise ValueError(f"{field} must be a list of at most {most} tokens, got {tokens!r:.60}")
        object.__setattr__(self, field, tuple(_token(field, token) for token in tokens))


def _token(field: str, value: object) -> int:
    """A token id, also one of numpy's integers."""
    try:
        token = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        token = -1
    if not 0 <= token <= _MOST:
        raise ValueError(f"{field} must hold token ids from 0 to {_MOST}, got {value!r:.60}")
    return token


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping) or len(biases) > 1 << 20:
        raise ValueError(f"logit_bias must map tokens to numbers from -100 to 100, got {biases!r:.60}")
    checked = {}
    for key, value in biases.items():
        # JSON has only strings for keys.
        token = _token("logit_bias", int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 11 else key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 100:
            raise ValueError(f"logit_bias of token {token} must be a number from -100 to 100, got {value!r:.60}")
        checked[token] = float(value)
    return checked
