"""The models and workloads that both sides of a comparison read."""

from dataclasses import dataclass

PAD, EOS, UNK = 0, 1, 2


@dataclass(frozen=True)
class Size:
    """A random Llama, and what a step samples with it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    vocab_size: int = 4096
    tie_word_embeddings: bool = False

    prompts: int = 8
    completions: int = 8
    # Shortest and longest prompt.
    prompt_tokens: tuple[int, int] = (64, 64)
    # Most new tokens of a completion.
    new_tokens: int = 64
    # A token ends a completion with a chance of 1 in this: every so many-th id is an end token, and a random model's
    # tokens are about equally likely.
    chance: int = 4096
    # Steps that are measured, the first included.
    steps: int = 6

    @property
    def sequences(self) -> int:
        return self.prompts * self.completions

    @property
    def length(self) -> int:
        """Most tokens of a sequence."""
        return self.prompt_tokens[1] + self.new_tokens

    @property
    def end_ids(self) -> list[int]:
        return list(range(EOS, self.vocab_size, self.chance))

    @property
    def mean_new_tokens(self) -> float:
        """Expected new tokens of a completion."""
        going_on = 1 - len(self.end_ids) / self.vocab_size
        return (1 - going_on**self.new_tokens) / (1 - going_on)


SIZES = {
    "base": Size(256, 704),
    "wide": Size(1024, 2816),
    "ragged": Size(256, 704, prompt_tokens=(8, 64), new_tokens=256, chance=64),
    "long": Size(256, 704, prompts=2, new_tokens=1024, chance=1024),
    # the shape of a 0.5B model (Qwen2.5's, as a Llama)
    "real": Size(
        896,
        4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
        prompts=2,
        completions=2,
        prompt_tokens=(32, 32),
        new_tokens=16,
        chance=151_936,
        steps=4,
    ),
}
