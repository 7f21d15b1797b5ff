"""Two terms of my own: thinking that is short, and no call made twice."""

from paravt_jax.rewards import OwnTerm, Place

MOST_WORDS = 60


def reward(question, answer, question_type, turns, calls, outcomes):
    ends = [turn.find("</think>") for turn in turns]
    words = sum(len(turn[:end].split()) for turn, end in zip(turns, ends, strict=True))
    closed = all(end >= 0 for end in ends)  # else nothing is thought to its end, and brevity is no merit
    brief = OwnTerm(
        "brief",
        max(0.0, 1 - words / MOST_WORDS) if closed else 0.0,
        places=tuple(Place(turn, end, end + len("</think>")) for turn, end in enumerate(ends) if closed),
        weight=0.2,
    )
    asked = [(call.name, str(call.arguments)) for call in calls]
    again = [Place(call.turn, *call.span) for n, call in enumerate(calls) if asked[n] in asked[:n]]
    return [brief, OwnTerm("repeated", -len(again), tuple(again), weight=0.1)]
