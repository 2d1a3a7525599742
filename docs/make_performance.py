"""Write the tables of docs/performance.md from what the benchmarks left in benchmarks/results.

make bench && python docs/make_performance.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
ORDER = ("policy_step", "rollout", "context", "learner", "learner_memory", "replay", "startup", "solve")


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def table(name: str, rows: list[dict]) -> str:
    """One benchmark: what was measured on which machine, then a line for each case. Ratios below their target are marked."""
    about = rows[0]
    head = f"`python -m benchmarks {name}`: {about['machine']}, torch {about['torch']}, {about['threads']} thread(s), commit {about['commit']}."
    lines = [
        f"### {name}",
        "",
        head,
        "",
        "| case | ours | ceiling | unit | ratio | target | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        missed = row["target"] is not None and row["ratio"] < row["target"]
        ratio = f"{row['ratio']:.2f}{' (missed)' if missed else ''}"
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        remarks = [row["note"]] if row["note"] else []
        if row["peer"] is not None:
            remarks.append(f"peer {number(row['peer'])}, {row['ratio_to_peer']:.2f} x")
        lines.append(
            f"| {row['case']} | {number(row['ours'])} | {number(row['ceiling'])} | {row['unit']} | {ratio} | {target} "
            f"| {'; '.join(remarks)} |"
        )
    return "\n".join(lines)


def main() -> None:
    page = HERE / "performance.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    files = [RESULTS / f"{name}.json" for name in ORDER]
    tables = [table(f.stem, json.loads(f.read_text(encoding="utf-8"))) for f in files if f.exists()]
    page.write_text(before + BEGIN + "\n\n" + "\n\n".join(tables) + "\n\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
