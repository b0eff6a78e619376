"""The part of `nixl_agent` that is about notifications."""

from __future__ import annotations

from collections.abc import Sequence

from pd_transfer.base import AgentBase, as_name


class NotificationCalls(AgentBase):
    notifs: dict[str, list[bytes]]

    def send_notif(
        self, remote_agent_name: str | bytes, notif_msg: bytes, backend: str | None = None
    ) -> None:
        """Send bytes to a peer, or to this agent itself. Not ordered with transfers.

        Raises:
            nixlNotFoundError: unknown agent.
            nixlRemoteDisconnectError: it died.
        """
        self._check_backends([] if backend is None else [backend])
        name = as_name(remote_agent_name)
        if name == self.name:
            self._state.notified(name, bytes(notif_msg))
        else:
            self._peer(name)
            self._backend.notify(name, bytes(notif_msg))
        self._state.count(notifications_sent=1)

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """What arrived since the last call, by sender. All data of a WRITE is visible by then."""
        self._check_backends(backends)
        return self._state.take_notifications()

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Add what `get_new_notifs` gives to `notifs`, and return that."""
        for sender, messages in self.get_new_notifs(backends).items():
            self.notifs.setdefault(sender, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a notification of the agent begins with the tag (or contains it).

        `notifs` is updated first, and the first match taken out of it: also an empty one, which
        upstream finds again and again.
        """
        self.update_notifs(backends)
        waiting = self.notifs.get(as_name(remote_agent_name), [])
        for index, message in enumerate(waiting):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del waiting[index]
                return True
        return False
