"""Train the pico model of the tests: a Llama of 0.6 million parameters on the embedded corpus.

    python tests/pico/train.py                  # train, write tests/pico/model/, print the perplexities
    python tests/pico/train.py --evaluate       # print the perplexities of tests/pico/model/

One thread, some minutes, no network. The package must be installed (`pip install -e .`).
"""

import argparse
import math
import time
from pathlib import Path

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from compress.data.ids import token_ids
from compress.data.installed_texts import embedded_text
from compress.data.sources import text_sha256
from compress.data.tokenization import token_stream

MODEL = Path(__file__).parent / "model"
END = "<|endoftext|>"
VOCABULARY = 1024
CONTEXT = 512  # tokens: max_position_embeddings
LENGTH = 128  # tokens a training window, and a test window
BATCH = 16  # windows a step
PEAK_RATE = 4e-3
WARMUP = 50  # steps
WEIGHT_DECAY = 0.5  # strong: the corpus has 0.1 million tokens, which 700 steps read 13 times


def tokenizer_of(documents: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; one token begins, ends and pads."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def config_of(end_id: int) -> LlamaConfig:
    """Return the shape: 128 is a multiple of 128; 288 = 4.5 * 64 is one of 32 only; k and v are 64 wide."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )


def rate_at(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then a cosine down to zero."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def optimizer_of(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves norms alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), eps=1e-8)


def train(model: PreTrainedModel, stream: Int[Tensor, " tokens"], steps: int, seed: int) -> None:
    """Train in place on windows drawn at random from the stream; print the loss (nats a token)."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))
    start = time.monotonic()
    model.train()
    for step in range(steps):
        offsets = torch.randint(len(stream) - LENGTH, (BATCH, 1), generator=generator)
        ids = stream[offsets + torch.arange(LENGTH)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: Int[Tensor, "sequences length"]) -> float:
    """Return exp of the mean loss over all windows; each window starts without context."""
    losses = [model(input_ids=rows, labels=rows).loss * len(rows) for rows in ids.split(16)]
    return math.exp(float(torch.stack(losses).sum()) / len(ids))


def unigram_perplexity(
    seen: Int[Tensor, " tokens"], ids: Int[Tensor, "sequences length"], vocabulary: int = VOCABULARY
) -> float:
    """Return the perplexity on `ids` (without column 0) of the token counts of `seen`, each plus one."""
    counts = torch.bincount(seen, minlength=vocabulary).double() + 1
    log_probability = (counts / counts.sum()).log()
    return math.exp(-float(log_probability[ids[:, 1:]].mean()))


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print both perplexities on the whole test part, and the hash of its text."""
    ids = token_ids("embedded", "test", tokenizer, None, LENGTH, seed=0)
    seen = token_stream(embedded_text("calibration"), tokenizer)
    print(f"parameters          {model.num_parameters()}")
    print(f"test tokens         {ids.numel()} in windows of {LENGTH}")
    print(f"test text sha256    {text_sha256(embedded_text('test'))}")
    print(f"perplexity          {perplexity(model, ids):.2f}")
    print(f"unigram perplexity  {unigram_perplexity(seen, ids):.2f}")


def main() -> None:
    """Train and save, or only evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL, help="folder of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=700, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (default: 0)")
    parser.add_argument("--evaluate", action="store_true", help="train nothing; evaluate the model in --out")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.evaluate:
        documents = embedded_text("calibration")
        tokenizer = tokenizer_of(documents)
        torch.manual_seed(chosen.seed)
        model = LlamaForCausalLM(config_of(tokenizer.eos_token_id))
        train(model, token_stream(documents, tokenizer), chosen.steps, chosen.seed)
        model.save_pretrained(chosen.out)
        tokenizer.save_pretrained(chosen.out)
    evaluate(AutoModelForCausalLM.from_pretrained(chosen.out), AutoTokenizer.from_pretrained(chosen.out))


if __name__ == "__main__":
    main()
