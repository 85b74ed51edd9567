"""Every sample is taken once, in order, however it is scored."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusion.rewards import RewardOutcome
from stalesync.prompts import Prompt
from stalesync.scoring.progress import ScoringProgress
from stalesync.scoring.samples import Sample
from tests.stalesync.fake_cluster import with_outcome

PROMPT = Prompt("g", (3, 4, 5), "1+1=", "2")


class Progress(RuleBasedStateMachine):
    """Every sample is taken once as generated and once as scored, whichever way it is scored."""

    def __init__(self):
        super().__init__()
        self.progress = ScoringProgress()
        self.known, self.held, self.to_score, self.generated, self.scored = 0, [], [], [], []
        self.unacknowledged = 0

    @rule(count=st.integers(0, 3), hold=st.booleans(), wait=st.booleans())
    def generate(self, count, hold, wait):
        samples = [Sample(f"s{self.known + k:03}", PROMPT, "", 1, 1) for k in range(count)]
        self.known += count
        self.progress.observe_generated(samples)
        self.held += samples
        if not hold:
            self.release(wait)

    @rule(wait=st.booleans())
    def release(self, wait):
        samples, self.held = self.held, []
        self.progress.observe_ready(samples, wait)
        self.to_score += [] if wait else samples

    @rule(count=st.integers(0, 3))
    def score(self, count):
        samples, self.to_score = self.to_score[:count], self.to_score[count:]
        self.progress.observe_scored([with_outcome(sample, RewardOutcome(1.0)) for sample in samples])
        self.progress.observe_to_acknowledge(len(samples))
        self.unacknowledged += len(samples)

    @rule(data=st.data())
    def acknowledge(self, data):
        count = data.draw(st.integers(0, self.unacknowledged))
        self.progress.observe_acknowledged(count)
        self.unacknowledged -= count

    @rule()
    def score_waiting(self):
        self.to_score += self.progress.take_waiting()

    @rule()
    def poll(self):
        generated, scored = self.progress.take_generated(), self.progress.take_scored()
        assert not self.progress.has_news
        for taken in (generated, scored):
            assert [one.id for one in taken] == sorted(one.id for one in taken)
        self.generated += [one.id for one in generated]
        self.scored += [one.id for one in scored]

    @invariant()
    def once(self):
        assert len({*self.generated}) == len(self.generated) and len({*self.scored}) == len(self.scored)
        assert self.progress.num_unscored == self.known - len(self.held) - len(self.scored)
        assert self.progress.num_unacknowledged == self.unacknowledged


Progress.TestCase.settings = settings(max_examples=30, deadline=None)
test_progress = Progress.TestCase
