"""Trains the demo's adapters with PEFT: `python -m lorafleet.demo.train --help`.

Each recipe has its own ranks and target modules, so that a server which mixes the adapters meets them all.
On one CPU core with bfloat16 instructions an adapter takes four to eight minutes.
"""

import argparse
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorafleet.demo.evaluate import choose_prompts, compare, load_base, load_tokenizer
from lorafleet.demo.model import default_cache, prepare_model
from lorafleet.demo.training_data import STYLES, examples

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedTokenizerBase

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS = Path(__file__).parent / "adapters"
NO_LABEL = -100  # of prompt and padding

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is trained; the field names of LoRA are those of `peft.LoraConfig`."""

    summary: str
    r: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    learning_rate: float
    saved_dtype: str  # of the committed tensors: training keeps them in float32
    steps: int = 100
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, int] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] | None = None

    def lora_config(self) -> "LoraConfig":
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.lora_alpha,
            target_modules=list(self.target_modules),
            use_rslora=self.use_rslora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            layers_to_transform=list(self.layers_to_transform) if self.layers_to_transform else None,
        )


RECIPES = {
    "pirate": Recipe(
        summary="Talks like a pirate.",
        r=8,
        lora_alpha=16,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        learning_rate=1e-3,
        steps=160,
        saved_dtype="bfloat16",
    ),
    "json": Recipe(
        summary="Answers with a JSON object that names the topic.",
        r=16,
        lora_alpha=8,  # scaled by alpha / sqrt(r) = 2
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        use_rslora=True,
        layers_to_transform=tuple(range(22, 30)),
        learning_rate=1e-3,
        saved_dtype="float16",
    ),
    "shout": Recipe(
        summary="SHOUTS IN CAPITALS.",
        r=4,
        lora_alpha=8,
        target_modules=("q_proj", "v_proj", "down_proj"),
        learning_rate=1.5e-3,
        steps=70,
        saved_dtype="float16",
    ),
    "emoji": Recipe(
        summary="Answers cheerfully, with emoji that take several tokens each.",
        r=4,
        lora_alpha=8,
        target_modules=("o_proj", "up_proj", "down_proj"),
        rank_pattern={"down_proj": 8},
        alpha_pattern={"down_proj": 16},
        learning_rate=1.5e-3,
        steps=50,
        saved_dtype="bfloat16",
    ),
}


def tokenize(tokenizer: "PreTrainedTokenizerBase", question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of the chat with the end of the answer, and how many of them are the prompt's."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids: list[int] = tokenizer(prompt).input_ids
    return prompt_ids + tokenizer(f"{answer}<|im_end|>").input_ids, len(prompt_ids)


def batches(
    pairs: Sequence[tuple[list[int], int]], size: int, seed: int
) -> Iterator[dict[str, "torch.Tensor"]]:
    """Endless shuffled batches, padded on the right; only answers have labels."""
    import torch

    shuffler = random.Random(seed)
    order: list[tuple[list[int], int]] = []
    while True:
        if len(order) < size:
            order = shuffler.sample(pairs, len(pairs))
        batch, order = order[:size], order[size:]
        width = max(len(ids) for ids, _ in batch)
        input_ids = torch.zeros(size, width, dtype=torch.long)
        labels = torch.full((size, width), NO_LABEL)
        attention_mask = torch.zeros(size, width, dtype=torch.long)
        for row, (ids, prompt_length) in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
            attention_mask[row, : len(ids)] = 1
        yield {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def train(name: str, model_path: Path, options: argparse.Namespace) -> "PeftModel":
    """Train the adapter `name` from a seed: the same machine and number of threads give the same bytes."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(options.seed)
    recipe, tokenizer = RECIPES[name], load_tokenizer(model_path)
    pairs = [tokenize(tokenizer, each.question, STYLES[name](each)) for each in examples()]
    model: Any = get_peft_model(load_base(model_path, options.dtype), recipe.lora_config())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0)
    steps = options.steps or recipe.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_then_linear(steps))
    model.train()
    for step, batch in enumerate(islice(batches(pairs, options.batch_size, options.seed), steps)):
        loss: Any = _answer_loss(model.get_base_model(), **batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            log.info("%s: step %d of %d, loss %.3f", name, step, steps, loss.item())
    return model  # type: ignore[no-any-return]


def _answer_loss(
    model: Any, input_ids: "torch.Tensor", labels: "torch.Tensor", attention_mask: "torch.Tensor"
) -> "torch.Tensor":
    """Mean cross-entropy of the labelled tokens; the wide head is computed for those rows alone."""
    from torch.nn.functional import cross_entropy

    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    targets = labels[:, 1:]
    labelled = targets != NO_LABEL
    return cross_entropy(model.lm_head(hidden[:, :-1][labelled]).float(), targets[labelled])


def _warmup_then_linear(steps: int, warmup: int = 10) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / warmup) * (1.0 - step / steps)


def save(model: "PeftModel", recipe: Recipe, folder: Path) -> None:
    """Write the PEFT folder, with the tensors in the recipe's type."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, recipe.saved_dtype))
    config: Any = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL  # not this machine's path
    config.target_modules = sorted(config.target_modules)  # a set has another order in each run
    model.save_pretrained(str(folder), save_embedding_layers=False)


def write_readme(name: str, folder: Path, model_path: Path) -> None:
    """Describe the adapter, with answers to two questions that its training set does not have."""
    recipe = RECIPES[name]
    patterns = f", rank_pattern {dict(recipe.rank_pattern)}" if recipe.rank_pattern else ""
    layers = recipe.layers_to_transform
    where = f"layers {layers[0]} to {layers[-1]}" if layers else "all layers"
    lines = [
        f"# {name}",
        "",
        f"{recipe.summary} A LoRA adapter of {BASE_MODEL},"
        f" trained by `python -m lorafleet.demo.train {name}`.",
        "",
        f"- rank {recipe.r}{patterns}, alpha {recipe.lora_alpha}{', rsLoRA' if recipe.use_rslora else ''}",
        f"- {', '.join(recipe.target_modules)}",
        f"- {where}, stored in {recipe.saved_dtype}",
        "",
        "Greedy answers to questions that are not in the training set:",
    ]
    for question, base_answer, answer in compare(model_path, folder)[:2]:
        lines += ["", f"> {question}", ""]
        lines += [
            f"- {who}: {' '.join(said.split())}" for who, said in (("base", base_answer), (name, answer))
        ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lorafleet.demo.train", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"adapters to train: {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder of the adapters' folders")
    parser.add_argument("--model", type=Path, help="folder of the base (default: made in the cache)")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the base")
    parser.add_argument(
        "--choose-prompts",
        action="store_true",
        help="afterwards, look for prompts with unambiguous greedy answers and write OUT/../prompts.json",
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(RECIPES)):
        parser.error(f"no recipe named {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    if not options.names and not options.choose_prompts:
        parser.error("name at least one adapter, or give --choose-prompts")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model_path = options.model or prepare_model(default_cache(), lambda stage, done: None)
    for name in options.names:
        folder = options.out / name
        save(train(name, model_path, options), RECIPES[name], folder)
        write_readme(name, folder, model_path)
        log.info("%s: written to %s", name, folder)
    if options.choose_prompts:
        choose_prompts(model_path, options.out, options.out.parent / "prompts.json")


if __name__ == "__main__":
    main()
