"""The rules: each judge turns the measurements of its checks into verdicts, with limits from one table."""
