"""The pad token of an exported reward model: one that no response ends with.

The library's pooling scores the last token of a row that is not the pad id: with pad = EOS that is the token before the end.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from ebft_ds.data.chat import eos_id, special_tokens
from ebft_ds.data.preference import RewardEncoding
from ebft_ds.data.preference.full import FullEncoder

logger = logging.getLogger(__name__)


def tokenizer_with_pad(tokenizer: PreTrainedTokenizerBase, encoding: RewardEncoding, vocab_size: int) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer whose pad token no encoded response ends with; without a pad token where there is no such token.

    Args:
        encoding: how responses are encoded; a chat template is the tokenizer's own.
        vocab_size: rows of the model's embedding.
    """
    ends = FullEncoder(tokenizer, encoding).end_ids
    pad = next((token for token in _candidates(tokenizer) if token not in ends and token < vocab_size), None)
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    if pad is None:
        logger.warning(
            "the exported reward model has no pad token: its tokenizer has no special token that no response ends with. "
            "transformers scores it one row at a time and refuses larger batches; `ebft-ds score` needs no padding"
        )
    return changed


def _candidates(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """The tokenizer's own pad, tokens that stand for nothing yet, BOS, the unknown token, and what else is special."""
    own = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    roles = {token for token in (*own, eos_id(tokenizer)) if token is not None}
    special, template = special_tokens(tokenizer), str(tokenizer.chat_template)
    yield from _known(own[:1])
    yield from (token for token, text in sorted(special.items()) if token not in roles and text not in template)
    yield from _known(own[1:])
    yield from sorted(special)


def _known(tokens: Iterable[int | None]) -> Iterator[int]:
    yield from (token for token in tokens if token is not None)
