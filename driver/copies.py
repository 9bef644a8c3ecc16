"""When a large SUBMIT may be sent once more."""

from __future__ import annotations

from dataclasses import dataclass

SEND_AGAIN_S, MAX_SEND_AGAIN_S = 1.0, 32.0  # shortest and longest wait, for the copy and then for its answer


@dataclass(slots=True)
class Copies:
    """Times the copies of one message. On a slow connection every copy delays what is sent after it, so at most one is
    under way.

    A copy has arrived once the service answers a question asked after it. The next copy is due if then, after another
    wait, the message itself is still unanswered. A service that was restarted needs one at once.
    """

    sent_to: int = -1  # the epoch of the service that was sent the last copy
    has_arrived: bool = False  # the last copy
    wait_s: float = SEND_AGAIN_S
    look_at: float = 0.0  # when the wait is over

    def is_due(self, epoch: int, now: float) -> bool:
        """Whether to send a copy now to the service of this epoch, which has just answered a question."""
        if epoch != self.sent_to:
            self.sent_to, self.has_arrived, self.wait_s = epoch, False, SEND_AGAIN_S
        elif now < self.look_at:
            return False
        else:
            self.has_arrived = not self.has_arrived
            self.wait_s = min(2 * self.wait_s, MAX_SEND_AGAIN_S)
        self.look_at = now + self.wait_s
        return not self.has_arrived
