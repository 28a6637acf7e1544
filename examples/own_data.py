"""Train on your own data with your own reward functions, and plot the result.

pip install 'covey[report]'     # plotly, for the chart
python examples/own_data.py
"""

import plotly.graph_objects as go

import covey

PAIRS = [(a, b) for a in range(10, 40) for b in range(1, 10)]
ROWS = [{"prompt": f"{a}+{b}?", "target": f"{a + b:02d}"} for a, b in PAIRS]


def correct(completions, target, **columns):
    return [
        float(f"<answer>{t}</answer>" in text) for text, t in zip(completions, target, strict=True)
    ]


def short(completions, **columns):
    return [-0.001 * len(text) for text in completions]


settings = {"train.steps": 10, "optimizer.learning_rate": 1e-4, "rollout.max_tokens": 32}
result = covey.train(model="embedded", dataset=ROWS, rewards=[correct, short], **settings)
steps = [m["step"] for m in result.metrics]
correct_rate = [m["objective/verifiable_correct_rate"] for m in result.metrics]
figure = go.Figure(go.Scatter(x=steps, y=correct_rate))
figure.write_html(result.folder / "success.html")
