"""When a large SUBMIT may be sent once more."""

from __future__ import annotations

from dataclasses import dataclass

SEND_AGAIN_S, MAX_SEND_AGAIN_S = 1.0, 32.0  # shortest and longest wait, for the copy and then for its answer


@dataclass(slots=True)
class Copies:
    """Where a copy takes long to arrive, each further one is in the way of whatever is sent next, for as long.

    So the next one waits until the service has answered a question that was asked after the last one, which has then
    arrived too, and then for the answer to that itself. A service that was restarted needs a new one at once.
    """

    sent_to: int = -1  # the life of the service that was sent the last one
    has_arrived: bool = False  # the last one
    wait_s: float = SEND_AGAIN_S
    look_at: float = 0.0  # when the wait is over

    def is_due(self, epoch: int, now: float) -> bool:
        """Whether to send one to a service in this life, which has just answered a question."""
        if epoch != self.sent_to:
            self.sent_to, self.has_arrived, self.wait_s = epoch, False, SEND_AGAIN_S
        elif now < self.look_at:
            return False
        else:
            self.has_arrived = not self.has_arrived
            self.wait_s = min(2 * self.wait_s, MAX_SEND_AGAIN_S)
        self.look_at = now + self.wait_s
        return not self.has_arrived
