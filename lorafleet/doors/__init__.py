"""What both services have at their doors: settings, logs, metrics, who calls, bounds on what comes in."""

from lorafleet.doors.bodies import message_is_done
from lorafleet.doors.door import HEALTH, REFLECTION, Door, House, Limits
from lorafleet.doors.handlers import Handlers
from lorafleet.doors.health import Health
from lorafleet.doors.peers import PeerRates
from lorafleet.doors.refusals import Refused

__all__ = [
    "HEALTH",
    "REFLECTION",
    "Door",
    "Handlers",
    "Health",
    "House",
    "Limits",
    "PeerRates",
    "Refused",
    "message_is_done",
]
