"""Stand-ins for the tiny tokenizers and text encoders that diffusers' pipeline tests download.

`write_hub` makes a cache folder of the Hugging Face hub with repositories of the same names: tokenizers that split a
prompt into its characters, and encoders of random weights, of the sizes that the tests' other models expect. What is
judged is not in them; with them most pipeline tests run without a network.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

TESTING = "hf-internal-testing"
REVISION = "0" * 40
BYTES = sorted(ByteLevel.alphabet())
CHARACTERS = string.ascii_letters + string.digits + string.punctuation
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 1103}
LLAMA_SIZES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
Write = Callable[[Path], object]


def number(*tokens: str) -> dict[str, int]:
    """A vocabulary of these tokens in this order."""
    return {token: index for index, token in enumerate(tokens)}


def clip_tokenizer(folder: Path) -> None:
    words = [*BYTES, *(f"{byte}</w>" for byte in BYTES)]
    vocabulary = number(*words, "<|startoftext|>", "<|endoftext|>")  # the end has the highest id, as text models expect
    transformers.CLIPTokenizer(vocabulary, [], model_max_length=77).save_pretrained(folder)


def t5_tokenizer(folder: Path) -> None:
    scores = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    scores += [(character, -2.0) for character in ("\N{LOWER ONE EIGHTH BLOCK}", *CHARACTERS)]
    transformers.T5Tokenizer(scores, model_max_length=512).save_pretrained(folder)


def t5(folder: Path) -> None:
    transformers.T5EncoderModel(transformers.T5Config(**T5_SIZES)).save_pretrained(folder)
    t5_tokenizer(folder)


def umt5(folder: Path) -> None:
    transformers.UMT5EncoderModel(transformers.UMT5Config(**T5_SIZES)).save_pretrained(folder)
    t5_tokenizer(folder)


def bert(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(vocab_size=1124, **sizes)).save_pretrained(folder)
    words = [*CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    vocabulary = number("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words)
    transformers.BertTokenizer(vocabulary, model_max_length=512).save_pretrained(folder)


def qwen(folder: Path) -> None:
    """A tokenizer with special tokens at the ids that models of this family expect, and an image processor."""
    vocabulary = number(*BYTES, *(f"<|{index}|>" for index in range(len(BYTES), 151643)), "<|endoftext|>")
    pairs = [f"<|{name}_{end}|>" for name in ("object_ref", "box", "quad", "vision") for end in ("start", "end")]
    markers = ["<|im_start|>", "<|im_end|>", *pairs, "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = transformers.Qwen2Tokenizer(vocabulary, [], model_max_length=32768, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.save_pretrained(folder)
    transformers.Qwen2VLConfig().save_pretrained(folder)
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen2VLProcessor"}
    patches |= {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
    for file, kind in (("preprocessor_config", "Image"), ("video_preprocessor_config", "Video")):
        processor = {f"{kind.lower()}_processor_type": f"Qwen2VL{kind}Processor"}
        (folder / f"{file}.json").write_text(json.dumps(patches | processor))


def gemma_tokenizer(folder: Path) -> None:
    """Every character is unknown: some tests have a vocabulary of eight."""
    vocabulary = number("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    transformers.GemmaConfig().save_pretrained(folder)
    transformers.GemmaTokenizer(vocabulary, [], model_max_length=512).save_pretrained(folder)


def llama_tokenizer(folder: Path) -> None:
    vocabulary = number("<unk>", "<s>", "</s>", "<pad>", "\N{LOWER ONE EIGHTH BLOCK}", *CHARACTERS)
    transformers.LlamaConfig(vocab_size=1000, **LLAMA_SIZES).save_pretrained(folder)
    tokenizer = transformers.LlamaTokenizer(vocabulary, [], pad_token="<pad>", model_max_length=2048)
    tokenizer.save_pretrained(folder)


def llama(folder: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1000, **LLAMA_SIZES))
    model.save_pretrained(folder)
    llama_tokenizer(folder)


REPOSITORIES: dict[str, Write] = {
    f"{TESTING}/tiny-random-clip": clip_tokenizer,
    f"{TESTING}/tiny-random-t5": t5,
    f"{TESTING}/tiny-random-T5Model": t5,
    f"{TESTING}/tiny-random-T5ForConditionalGeneration": t5,
    f"{TESTING}/tiny-random-umt5": umt5,
    f"{TESTING}/tiny-random-BertModel": bert,
    f"{TESTING}/tiny-random-Qwen2VLForConditionalGeneration": qwen,
    f"{TESTING}/dummy-gemma": gemma_tokenizer,
    f"{TESTING}/llama-tokenizer": llama_tokenizer,
    f"{TESTING}/tiny-random-LlamaForCausalLM": llama,
    "finetrainers/dummy-hunyaunvideo": lambda folder: llama_tokenizer(folder / "tokenizer"),
}


def write_hub(home: Path) -> None:
    """Write the repositories under a folder, which the variable `HF_HOME` names."""
    for name, write in REPOSITORIES.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        if (repository / "refs" / "main").exists():
            continue
        torch.manual_seed(0)
        write(repository / "snapshots" / REVISION)
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(REVISION)
