"""Train the model in the box: a small LLaDA and the D2F LoRA that makes it block-causal.

    python examples/train_tiny.py --out box

What it does, in order:

1. trains the base: LLaDA's masked-diffusion loss under full attention (every answer token is masked
   with one random probability t, the loss is weighted by 1/t), mixed with block-causal batches;
2. trains a LoRA on q, k, v and output projections with D2F's block-causal loss, the base frozen;
3. saves both in half precision, in the published LLaDA layout and PEFT's, with the tokenizer and
   the decoding settings;
4. loads what it saved and answers held-out prompts with the real engine: share of exact answers,
   and the 10th, 50th and 90th percentile of forwards per request.

Block-causal batches come in two kinds. In *pipeline* batches the blocks of an answer are masked
with probabilities that rise from block to block, or the blocks before one are clean, it is partly
masked and the later ones are hidden: what the decoder sees while several blocks are open. In *two
stream* batches the answer stands there twice, once masked and once clean; a masked block sees the
prompt, itself and the clean blocks before it, so one sequence teaches all of its blocks at once.

The shipped weights took about 70 minutes on one of two busy cores of an x86-64 server (AMD EPYC),
half of that as processor time, in three sittings that each went on from the one before
(`--resume`): 2,500 steps on one verb, 1,700 on it with up to 6 items and a lower rate, 1,300 on all
verbs (`--first-verb-steps 0 --plain 0.1 --average 0.995 --lr 2e-3 --muon-lr 0.014`), and 200 of the
LoRA. The defaults put this into one sitting; that command itself has not been run to its end.
Training is deterministic for one thread on one machine; other machines round differently.

The decoding settings are strict (`skip_threshold` 0.999): the model is sure of most tokens at once,
and with 0.9 most answers would take one to three forwards.

Source: masked-diffusion loss, Nie et al. (arXiv 2502.09992); block-causal training with rising
noise, Wang et al. (arXiv 2508.09192); masked next to clean blocks, Arriola et al. (arXiv
2503.09573); orthogonalised momentum, Jordan et al. (Muon, 2024). Own code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dllm_sched import Scheduler, presets
from dllm_sched_hf import D2FEngine, LLaDAConfig, LLaDAModelLM, load_model
from dllm_sched_hf.box import BASE_NAME, DECODING, LORA_NAME, build_tokenizer, task

EOS_ID, MASK_ID = task.EOS_ID, task.MASK_ID
IGNORED = -100
Ints = NDArray[np.int64]


class Example(NamedTuple):
    """One training pair as ids."""

    prompt: Ints
    answer: Ints  #: ends with one end-of-text
    verb: str


class Batch(NamedTuple):
    """Sequences padded on the right to a common length n."""

    ids: Tensor  #: int64 ``[batch, n]``
    positions: Tensor  #: int64 ``[batch, n]``
    visible: Tensor  #: bool ``[batch, 1, n, n]``
    target: Tensor  #: int64 ``[batch, n]``, IGNORED where nothing is learnt
    weight: Tensor  #: float32 ``[batch, n]``


# --- data -------------------------------------------------------------------------------------


def make_examples(n: int, seed: int) -> list[Example]:
    """Return `n` pairs of the training split."""
    examples = []
    for prompt, answer in task.sample_requests(n, seed, "train"):
        prompt_ids, answer_ids = task.encode_prompt(prompt), [*task.encode(answer), EOS_ID]
        examples.append(Example(np.array(prompt_ids), np.array(answer_ids), prompt.split()[0]))
    return examples


def _noise(kind: str, num_blocks: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Masking probability of each block."""
    if kind == "two_stream":
        noise = rng.random(num_blocks)
        noise[rng.random(num_blocks) < 0.4] = 1.0
    elif rng.random() < 0.5:
        noise = np.sort(rng.random(num_blocks))
    else:
        current = int(rng.integers(num_blocks))
        noise = np.ones(num_blocks)
        noise[:current] = 0.0
        noise[current] = rng.random()
    return noise


def make_batch(
    examples: Sequence[Example], kind: str, block_length: int, rng: np.random.Generator
) -> Batch:
    """Mask the answers of `examples` and lay them out.

    Args:
        examples: The batch.
        kind: "plain" (full attention), "pipeline" or "two_stream" (block-causal).
        block_length: Tokens of a block; answers are filled up with end-of-text to whole blocks.
        rng: Source of the masks.
    """
    rows = []
    for example in examples:
        num_blocks = -(-len(example.answer) // block_length)
        if kind == "pipeline":  # the decoder opens blocks beyond the end before it knows of it
            num_blocks += int(rng.integers(3))
        clean = np.full(num_blocks * block_length, EOS_ID)
        clean[: len(example.answer)] = example.answer
        block = np.arange(len(clean)) // block_length + 1
        if kind == "plain":
            noise = rng.uniform(0.02, 1.0)
            weight = np.full(len(clean), 1.0 / noise)
            hidden = rng.random(len(clean)) < noise
            block = np.zeros_like(block)
        else:
            weight = np.ones(len(clean))
            hidden = rng.random(len(clean)) < _noise(kind, num_blocks, rng)[block - 1]
        masked = np.where(hidden, MASK_ID, clean)
        prompt_len, answer_len = len(example.prompt), len(clean)
        answers = [masked, clean] if kind == "two_stream" else [masked]
        stream = np.zeros(prompt_len + len(answers) * answer_len, np.int64)
        stream[prompt_len : prompt_len + answer_len] = kind == "two_stream"
        position = np.arange(prompt_len + answer_len)
        target = np.full(len(stream), IGNORED)
        weights = np.zeros(len(stream))
        learnt = slice(prompt_len, prompt_len + answer_len)
        target[learnt] = np.where(hidden, clean, IGNORED)
        weights[learnt] = weight
        rows.append(
            (
                np.concatenate((example.prompt, *answers)),
                np.concatenate((position, position[prompt_len:]))[: len(stream)],
                np.concatenate((0 * example.prompt, *[block] * len(answers))),
                stream,
                target,
                weights,
            )
        )
    length = max(len(row[0]) for row in rows)
    fills = (EOS_ID, 0, -1, 0, IGNORED, 0.0)
    ids, positions, block, stream, target, weights = (
        torch.from_numpy(
            np.stack([np.pad(r[i], (0, length - len(r[i])), constant_values=fill) for r in rows])
        )
        for i, fill in enumerate(fills)
    )
    # Block -1 is padding: nobody sees it, and it sees the prompt only to keep softmax finite.
    here, there = block[:, :, None].clamp(min=0), block[:, None, :]
    masked_here, masked_there = stream[:, :, None] == 1, stream[:, None, :] == 1
    visible = torch.where(
        masked_there,
        masked_here & (there == here),
        (there < here) | (~masked_here & (there == here)),
    ) & (there >= 0)
    return Batch(ids, positions, visible[:, None], target, weights.float())


# --- training ---------------------------------------------------------------------------------


class Rotary:
    """Rotary embedding at the given positions, half-split layout, as the model's blocks take it."""

    def __init__(self, positions: Tensor, config: LLaDAConfig) -> None:
        even = torch.arange(0, config.head_dim, 2)
        angle = positions[..., None, None] / config.rope_theta ** (even / config.head_dim)
        self.cos, self.sin = (
            torch.cat((angle, angle), -1).cos(),
            torch.cat((-angle, angle), -1).sin(),
        )

    def turn(self, x: Tensor) -> Tensor:
        """Rotate ``x`` ``[batch, n, heads, head_dim]``."""
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def logits_at(model: nn.Module, batch: Batch) -> Tensor:
    """Run `model` with each token at its given position; ``[batch, n, vocab]``.

    As ``LLaDAModelLM.forward``, which always counts positions from 0: a two-stream sequence holds
    each answer position twice.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = base.model.transformer

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=batch.visible).transpose(1, 2)

    x = parts.wte(batch.ids)
    rotary = Rotary(batch.positions, base.config)
    for block in parts.blocks:
        x = block(x, rotary, attend)
    return parts.ff_out(parts.ln_f(x))


class Muon:
    """Momentum made orthogonal, for the weight matrices of the blocks.

    Matrices of one shape (or its transpose) are orthogonalised together, in float32: bfloat16 is
    slow on most CPUs. Learns this task in about half the steps that AdamW takes.

    Args:
        matrices: Two-dimensional parameters.
        lr: Spectral norm of a full step.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float) -> None:
        self.lr = lr
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            shapes[tuple(sorted(matrix.shape))].append(matrix)
        self.groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Move by ``scale * lr``."""
        lr = self.lr * scale
        for group, momentum in self.groups:
            tall = [m.shape[0] > m.shape[1] for m in group]
            grads = torch.stack(
                [m.grad.mT if t else m.grad for m, t in zip(group, tall, strict=True)]
            )
            momentum.lerp_(grads, 0.05)
            updates = _orthogonal(grads.lerp(momentum, 0.95))
            for matrix, is_tall, update in zip(group, tall, updates, strict=True):
                gain = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                matrix.mul_(1 - 0.05 * lr).add_(update.mT if is_tall else update, alpha=-lr * gain)


def _orthogonal(x: Tensor) -> Tensor:
    """Pull all singular values of ``x`` ``[k, rows <= columns]`` near 1 (Newton-Schulz)."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def init_weights(model: LLaDAModelLM) -> None:
    """Start with embeddings that are heard and residual branches that are silent."""
    for name, weight in model.named_parameters():
        if "wte" in name:
            nn.init.normal_(weight, std=0.5)
        elif name.endswith("out.weight"):
            nn.init.zeros_(weight)
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def make_model(args: argparse.Namespace) -> LLaDAModelLM:
    """Return a fresh model, or the base in ``args.resume`` to be trained further."""
    if args.resume is not None:
        return load_model(args.resume, device="cpu").requires_grad_(True)
    model = LLaDAModelLM(
        LLaDAConfig(
            d_model=args.d_model,
            n_layers=args.n_layers,
            n_heads=args.n_heads,
            mlp_hidden_size=args.mlp_hidden_size,
            vocab_size=len(task.VOCABULARY),
            max_sequence_length=128,
            rope_theta=10_000.0,
            mask_token_id=MASK_ID,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
    )
    init_weights(model)
    return model


def batches(
    examples: list[Example],
    mix: dict[str, float],
    args: argparse.Namespace,
    *,
    seed: int,
    first_verb_steps: int,
) -> Iterator[Batch]:
    """Yield random batches of examples of similar length for ever.

    The first ``first_verb_steps`` know one verb only: to look up the number behind a letter is
    hard to learn, and every further verb can build on it.
    """
    rng = np.random.default_rng(seed)
    length = np.array([len(e.prompt) + 2 * len(e.answer) for e in examples])
    first_verb = np.flatnonzero([e.verb == task.VERBS[0] for e in examples])
    for group in itertools.count():
        pool = first_verb if 16 * group < first_verb_steps else np.arange(len(examples))
        chosen = rng.choice(pool, 16 * args.batch_size)
        chosen = chosen[np.argsort(length[chosen], kind="stable")].reshape(16, -1)
        for rows in rng.permutation(chosen):
            kind = rng.choice(list(mix), p=list(mix.values()))
            yield make_batch([examples[i] for i in rows], kind, args.block_length, rng)


def train(
    model: nn.Module,
    examples: list[Example],
    mix: dict[str, float],
    num_steps: int,
    args: argparse.Namespace,
    *,
    label: str,
    lr: float,
    muon: bool,
    first_verb_steps: int = 0,
) -> None:
    """Train what requires a gradient; leave the moving average of the weights in ``model``.

    The learning rate warms up, stays, and falls linearly over the last third of the steps.
    """
    learnt = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for n, p in learnt.items() if muon and ".blocks." in n and p.dim() == 2]
    known = {id(p) for p in matrices}
    rest = [p for p in learnt.values() if id(p) not in known]
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    shaper = Muon(matrices, args.muon_lr)
    average = {n: p.detach().clone() for n, p in learnt.items()}
    source = batches(examples, mix, args, seed=args.seed, first_verb_steps=first_verb_steps)
    started, losses, hits = time.monotonic(), [], []
    for step in range(1, num_steps + 1):
        scale = min(1.0, step / 100, 3.0 * (num_steps - step + 1) / num_steps)
        batch = next(source)
        logits, chosen = logits_at(model, batch), batch.target != IGNORED
        logits, target, weight = logits[chosen], batch.target[chosen], batch.weight[chosen]
        loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        adam.param_groups[0]["lr"] = lr * scale
        adam.step()
        shaper.step(scale)
        keep = min(args.average, step / (step + 10))
        with torch.no_grad():
            for name, weight in learnt.items():
                average[name].lerp_(weight, 1 - keep)
        losses.append(loss.item())
        hits.append((logits.argmax(-1) == target).float().mean().item())
        if step % args.report_every == 0 or step == num_steps:
            minutes = (time.monotonic() - started) / 60
            print(
                f"{label}: step {step}/{num_steps}, loss {np.mean(losses):.4f}, "
                f"masked tokens right {np.mean(hits):.4f}, {minutes:.1f} min, "
                f"{minutes * (num_steps - step) / step:.1f} min to go",
                flush=True,
            )
            losses, hits = [], []
            if args.checkpoint is not None:
                save_file(average, args.checkpoint)
    with torch.no_grad():
        for name, weight in learnt.items():
            weight.copy_(average[name])


# --- saving and judging -----------------------------------------------------------------------


def save_base(model: LLaDAModelLM, directory: Path) -> None:
    """Write config, float16 weights, tokenizer and decoding settings in the published layout."""
    model.config.architectures = ["LLaDAModelLM"]
    model.config.dtype = torch.float16
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    tensors = {n: t.detach().half().contiguous() for n, t in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(directory)
    (directory / "decoding.json").write_text(json.dumps(DECODING, indent=2) + "\n")


def add_lora(model: LLaDAModelLM, args: argparse.Namespace) -> PeftModel:
    """Freeze ``model`` and put a fresh LoRA on its attention projections."""
    model.name_or_path = BASE_NAME
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_rank,
        target_modules=["q_proj", "k_proj", "v_proj", "attn_out"],
    )
    with warnings.catch_warnings():
        # PEFT asks transformers for an attribute by a name that newer releases deprecate.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, lora)


def save_lora(tuned: PeftModel, directory: Path) -> None:
    """Write the adapter's config and float16 weights as PEFT does."""
    tuned.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)  # a blank form
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"].sort()  # comes from a set, in any order
    path.write_text(json.dumps(config, indent=2) + "\n")
    path = directory / "adapter_model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def machine() -> str:
    """Return processor and torch version, for the record."""
    return f"{platform.machine()} {platform.system()}, torch {torch.__version__}"


class Report(NamedTuple):
    """How the model does on prompts it has never seen."""

    exact: float  #: share of exact answers
    by_verb: dict[str, float]
    steps: tuple[int, int, int]  #: 10th, 50th and 90th percentile of forwards per request

    def __str__(self) -> str:
        verbs = ", ".join(f"{verb} {share:.3f}" for verb, share in self.by_verb.items())
        low, middle, high = self.steps
        return f"{self.exact:.1%} exact ({verbs}); steps p10 {low}, p50 {middle}, p90 {high}"


def evaluate(directory: Path, num_prompts: int, *, lora: bool = True, seed: int = 2) -> Report:
    """Answer distinct held-out prompts with the engine, 16 at a time, and check them.

    Args:
        directory: Holds the two directories that :func:`main` writes.
        num_prompts: How many prompts, 1 to 2,000.
        lora: Whether to use the LoRA.
        seed: Of the prompts.
    """
    model = load_model(directory / BASE_NAME, directory / LORA_NAME if lora else None, device="cpu")
    engine = D2FEngine(model, max_num_seqs=16)
    scheduler = Scheduler(policy=presets.continuous(16), capacity=engine.capacity())
    pairs = list(task.sample_requests(num_prompts, seed, distinct=True))
    for i, (prompt, _) in enumerate(pairs):
        request = engine.request(str(i), task.encode_prompt(prompt), **DECODING)
        scheduler.submit(request, now=0.0)
    scheduler.drain(now=0.0)
    right: dict[str, list[bool]] = {verb: [] for verb in task.VERBS}
    steps = []
    while scheduler.has_work():
        batch = scheduler.next_step(now=0.0).batch
        update = scheduler.complete_step(batch, engine.run(batch), now=0.0)
        engine.release(update.released)
        for done in update.finished:
            prompt = pairs[int(done.request.id)][0]
            right[prompt.split()[0]].append(task.check(prompt, task.decode(done.output.tokens)))
            steps.append(done.output.num_forwards)
    shares = {verb: float(np.mean(answers)) for verb, answers in right.items() if answers}
    exact = sum(map(sum, right.values())) / num_prompts
    low, middle, high = (int(np.percentile(steps, q, method="nearest")) for q in (10, 50, 90))
    return Report(exact, shares, (low, middle, high))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("box"), help="directory to write to")
    parser.add_argument("--resume", type=Path, help="base to train further (its shape counts)")
    parser.add_argument("--steps", type=int, default=6000, help="of the base")
    parser.add_argument("--first-verb-steps", type=int, default=2500, help="on one verb only")
    parser.add_argument("--lora-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW")
    parser.add_argument("--lora-lr", type=float, default=5e-4)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--mlp-hidden-size", type=int, default=384)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--num-examples", type=int, default=200_000)
    parser.add_argument("--num-prompts", type=int, default=500, help="held out, to evaluate on")
    parser.add_argument("--plain", type=float, default=0.2, help="share of fully seen batches")
    parser.add_argument("--average", type=float, default=0.998, help="decay of the mean of weights")
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="file for the mean weights at each report")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works")
    args = parser.parse_args(argv)
    args.block_length = DECODING["block_length"]
    if args.smoke:
        args.steps, args.lora_steps, args.report_every = 6, 4, 2
        args.d_model, args.n_layers, args.mlp_hidden_size = 32, 2, 64
        args.num_examples, args.num_prompts, args.batch_size = 500, 8, 4
    return args


def main(argv: Sequence[str] | None = None) -> Report:
    """Train, save, reload, evaluate; return what the saved model does."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    examples = make_examples(args.num_examples, args.seed)
    model = make_model(args)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(
        model,
        examples,
        {"plain": args.plain, "two_stream": 0.8 - args.plain, "pipeline": 0.2},
        args.steps,
        args,
        label="base",
        lr=args.lr,
        muon=True,
        first_verb_steps=args.first_verb_steps,
    )
    save_base(model, args.out / BASE_NAME)
    print(
        f"base alone: {evaluate(args.out, args.num_prompts, lora=False)}",
        flush=True,
    )

    # The LoRA learns on the weights that are shipped, rounding included.
    tuned = add_lora(load_model(args.out / BASE_NAME, device="cpu"), args)
    mix = {"two_stream": 0.5, "pipeline": 0.5}
    train(tuned, examples, mix, args.lora_steps, args, label="lora", lr=args.lora_lr, muon=False)
    save_lora(tuned, args.out / LORA_NAME)
    report = evaluate(args.out, args.num_prompts)
    print(f"base and LoRA: {report}")
    print(f"{(time.monotonic() - started) / 60:.1f} min on {machine()}, {args.threads} thread(s)")
    return report


if __name__ == "__main__":
    main()
