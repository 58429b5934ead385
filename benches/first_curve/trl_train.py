from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def exact(completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


dataset = load_dataset("json", data_files="sums.jsonl", split="train")
config = GRPOConfig(
    output_dir="trl",
    max_steps=40,
    per_device_train_batch_size=512,
    num_generations=8,
    max_completion_length=5,
    learning_rate=2e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=10,
    beta=0.0,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
)
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    processing_class=AutoTokenizer.from_pretrained("model", padding_side="left"),
    reward_funcs=exact,
    args=config,
    train_dataset=dataset,
)
trainer.train()
for row in trainer.state.log_history:
    if "reward" in row:
        print(row["step"], row["reward"])
