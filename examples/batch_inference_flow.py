# Answers to the prompts of a Parquet file, with a model that the step's machine is chosen for
# python examples/batch_inference_flow.py run --model MODEL --prompts prompts.parquet
"""Batch inference: reads prompts from a Parquet file and writes a Parquet file with their answers.

A retry, or the command `resume`, answers only the prompts that have no answer yet.
"""

from pathlib import Path

from metaflow import FlowSpec, Parameter, current, gpu_profile, retry, step

BATCH = 8


class BatchInferenceFlow(FlowSpec):
    model = Parameter("model", help="A folder or a Hugging Face id.", required=True)
    prompts = Parameter("prompts", help="A Parquet file with a column of prompts.", required=True)
    column = Parameter("column", default="prompt")
    output = Parameter("output", default="answers.parquet")
    max_new_tokens = Parameter("max-new-tokens", default=128)

    @step
    def start(self):
        self.next(self.answer)

    @retry(times=1, minutes_between_retries=0)
    @gpu_profile(model="{model}", request="inference", seq_len=2048)
    @step
    def answer(self):
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = current.gpu_profile.checkpoint_dir  # kept in the datastore, found again by a retry
        generate = None
        for number, batch in enumerate(
            pq.ParquetFile(self.prompts).iter_batches(BATCH, columns=[self.column])
        ):
            part = parts / f"{number:06d}.parquet"
            if part.exists():
                continue
            generate = generate or load(self.model, self.max_new_tokens)
            texts = batch.column(self.column).to_pylist()
            table = pa.table({self.column: texts, "answer": generate(texts)})
            pq.write_table(table, part.with_suffix(".new"))
            part.with_suffix(".new").rename(part)
            current.gpu_profile.report(step=number + 1, samples=len(texts))
        answers = pa.concat_tables(pq.read_table(part) for part in sorted(parts.glob("*.parquet")))
        pq.write_table(answers, self.output)
        self.rows = answers.num_rows
        self.next(self.end)

    @step
    def end(self):
        print(f"{self.rows} answers in {Path(self.output).resolve()}")


def load(name, max_new_tokens):
    """Return a function that answers a list of prompts, in the chat template of the model if it has one."""
    from metaflow import load_model

    model, tokenizer = load_model(name)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def render(prompt):
        messages = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def generate(prompts):
        chats = bool(tokenizer.chat_template)
        texts = list(map(render, prompts)) if chats else prompts
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chats)
        inputs = inputs.to(model.device)
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return generate


if __name__ == "__main__":
    BatchInferenceFlow()
