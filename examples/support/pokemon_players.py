"""The two players of a battle as clients of a Showdown server.

This module imports poke-env, so `PokemonBattle` imports it when it is instantiated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from poke_env import AccountConfiguration, ServerConfiguration
from poke_env.battle import Battle
from poke_env.player import Player, SimpleHeuristicsPlayer
from poke_env.player.battle_order import BattleOrder, DefaultBattleOrder, ForfeitBattleOrder, SingleBattleOrder

from support.showdown import BattleError

SWITCHES, MOVES = 6, 4
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: the thread of a loop does not survive a fork
logging.getLogger("poke-env").setLevel(logging.ERROR)  # it warns of every unknown effect


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process, in a separate thread."""
    if os.getpid() not in _loops:
        _loops[os.getpid()] = loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda loop, context: None)  # poke-env logs these exceptions, and `_Reporter` forwards them
        threading.Thread(target=loop.run_forever, name="amago-pokemon", daemon=True).start()
    return _loops[os.getpid()]


# ---- legal choices ---------------------------------------------------------------------------------------------------------


def gimmicks(gen: int) -> list[str]:
    """The modifiers of moves in a generation of the game, in the order of poke-env's actions."""
    return ["", "mega", "z_move", "dynamax", "terastallize"][: max(1, min(gen, 9) - 4)]


def legal_orders(battle: Battle, gen: int) -> dict[int, str]:
    """The message to the server for each action that is legal now; empty after the end of the battle."""
    if battle.finished:
        return {}
    team = list(battle.team.values())
    if battle.teampreview:
        return {i: "/team " + "".join(str(j + 1) for j in _first(i, len(team))) for i in range(len(team))}
    orders: dict[int, str] = {}
    if not battle.trapped:
        can_enter = {id(mon) for mon in battle.available_switches}
        for i, mon in enumerate(team[:SWITCHES]):
            if id(mon) in can_enter:
                orders[i] = SingleBattleOrder(mon).message
    active = battle.active_pokemon
    if active is None or battle.force_switch:
        return orders
    allowed = {
        "": True, "mega": battle.can_mega_evolve, "z_move": battle.can_z_move, "dynamax": battle.can_dynamax,
        "terastallize": battle.can_tera,
    }  # fmt: skip
    z_moves = {move.id for move in active.available_z_moves} if battle.can_z_move else set()
    for slot, move in move_slots(battle):
        for g, gimmick in enumerate(gimmicks(gen)):
            if allowed[gimmick] and (gimmick != "z_move" or move.id in z_moves):
                order = SingleBattleOrder(move, **({gimmick: True} if gimmick else {}))
                orders[SWITCHES + MOVES * g + slot] = order.message
    return orders


def move_slots(battle: Battle) -> list[tuple[int, Any]]:
    """The available moves with their slots (0 to 3). A move outside the four known ones, such as Struggle, has slot 0."""
    known = [move.id for move in list(battle.active_pokemon.moves.values())[:MOVES]] if battle.active_pokemon else []
    return [(known.index(move.id) if move.id in known else 0, move) for move in battle.available_moves]


def _first(i: int, n: int) -> list[int]:
    return [i, *(j for j in range(n) if j != i)]


# ---- scripted players ------------------------------------------------------------------------------------------------------


def scripted_order(kind: str, battle: Battle, gen: int, rng: np.random.Generator) -> str:
    """The choice of the scripted player ``kind`` ("random", "max_power" or "heuristic"), as a message to the server."""
    orders = legal_orders(battle, gen)
    if not orders:
        return str(DefaultBattleOrder().message)
    if not battle.teampreview:
        moves = battle.available_moves
        if kind == "max_power" and moves:
            return str(SingleBattleOrder(max(moves, key=lambda move: move.base_power)).message)
        both = battle.active_pokemon is not None and battle.opponent_active_pokemon is not None
        if kind == "heuristic" and both and (moves or battle.available_switches):
            return str(SimpleHeuristicsPlayer.choose_singles_move(battle)[0].message)
    return orders[sorted(orders)[int(rng.integers(len(orders)))]]


class _Text(BattleOrder):
    """An order with a given message."""

    def __init__(self, message: str):
        self._message = message

    @property
    def message(self) -> str:
        return self._message


# ---- clients ---------------------------------------------------------------------------------------------------------------


class _Reporter(logging.Handler):
    """Forward the exceptions of tasks and the rejections of the server, which poke-env only logs, to ``inbox``."""

    def __init__(self, inbox: queue.SimpleQueue[Any]):
        super().__init__(logging.WARNING)
        self.inbox = inbox

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR or text.startswith("Popup message"):
            if record.exc_info and record.exc_info[1]:
                text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
            self.inbox.put(BattleError(text))


class _Client(Player):
    def __init__(self, url: str, battle_format: str, gen: int, inbox: queue.SimpleQueue[Any]):
        self.gen, self.inbox = gen, inbox
        # account names must be unique on the server, even among environments with the same seed
        account = AccountConfiguration(f"amago {secrets.token_hex(6)}", None)
        super().__init__(
            account, battle_format=battle_format, server_configuration=ServerConfiguration(url, ""), loop=_loop(),
            start_listening=False, max_concurrent_battles=1, ping_interval=None, log_level=logging.WARNING,
        )  # fmt: skip
        self.logger.handlers, self.logger.propagate = [_Reporter(inbox)], False
        self.refused, self.stuck = 0, False
        self.listening = asyncio.run_coroutine_threadsafe(self.ps_client.listen(), _loop())
        self.listening.add_done_callback(lambda _: inbox.put(BattleError("the connection to the server has ended")))

    async def _handle_battle_request(self, battle: Any, maybe_default_order: bool = False) -> None:
        self.stuck = maybe_default_order  # the server has rejected the last choice and repeats the request
        if not battle.finished:
            await super()._handle_battle_request(battle)

    async def _handle_battle_message(self, split_messages: list[list[str]]) -> None:
        """Ignore messages about finished battles: poke-env would wait for those battles to begin, for ever."""
        opens = len(split_messages) > 1 and split_messages[1][1:2] == ["init"]
        if opens or split_messages[0][0][1:] in self.battles:
            self.refused += sum(message[1:2] == ["error"] for message in split_messages)
            await super()._handle_battle_message(split_messages)

    async def disconnect(self) -> None:
        self.logger.handlers = [logging.NullHandler()]
        tasks = list(self.ps_client._active_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self.ps_client, "websocket"):
            await self.ps_client.websocket.close()
        self.listening.cancel()
        logging.Logger.manager.loggerDict.pop(self.username, None)


class Agent(_Client):
    """A client that puts the battle into ``inbox`` at each choice and at the end; at a choice it waits for `answer`."""

    _waiting_for: asyncio.Future[str] | None = None

    def choose_move(self, battle: object) -> Awaitable[BattleOrder]:
        return self._choose(battle)

    async def _choose(self, battle: object) -> BattleOrder:
        return _Text(await self._ask(battle))

    def teampreview(self, battle: object) -> Awaitable[str]:
        return self._ask(battle)

    async def _ask(self, battle: object) -> str:
        self._waiting_for = asyncio.get_running_loop().create_future()
        self.inbox.put(battle)
        return await self._waiting_for

    def answer(self, message: str) -> None:
        future = self._waiting_for
        assert future is not None
        _loop().call_soon_threadsafe(lambda: None if future.done() else future.set_result(message))

    def _battle_finished_callback(self, battle: object) -> None:
        self.inbox.put(battle)


class Scripted(_Client):
    """A player that chooses by `scripted_order`."""

    kind = "random"
    rng = np.random.default_rng(0)

    def choose_move(self, battle: object) -> BattleOrder:
        if self.stuck:
            return DefaultBattleOrder()
        return _Text(scripted_order(self.kind, battle, self.gen, self.rng))

    def teampreview(self, battle: object) -> str:
        return scripted_order(self.kind, battle, self.gen, self.rng)


class Table:
    """Battles between an agent and a scripted player, one after the other. Not thread-safe.

    Args:
        url: url of the server.
        battle_format: id of the format.
        gen: generation of the format.
        timeout: maximum seconds to wait for the server.
    """

    def __init__(self, url: str, battle_format: str, gen: int, timeout: float):
        self.url, self.timeout = url, timeout
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.agent = Agent(url, battle_format, gen, self.inbox)
        self.rival = Scripted(url, battle_format, gen, self.inbox)
        self._over: Future[None] | None = None
        self._finished = True

    def begin(self, kind: str, seed: str, rng: np.random.Generator, teams: Sequence[str] = ()) -> Battle:
        """Forfeit the present battle, if any, and begin another. ``teams`` holds the teams of both sides, empty if the server
        draws them."""
        while not self._finished:
            self.play(ForfeitBattleOrder().message)
        if self._over is not None:
            self._over.result(self.timeout)
        self.agent.reset_battles()
        self.rival.reset_battles()
        for player, team in zip((self.agent, self.rival), teams):
            player.update_team(team)
        self.rival.kind, self.rival.rng, self.agent.refused = kind, rng, 0
        self._over = asyncio.run_coroutine_threadsafe(self._battle(seed), _loop())
        return self._next()

    async def _battle(self, seed: str) -> None:
        for player in (self.agent, self.rival):
            await player.ps_client.logged_in.wait()
        await self.agent.ps_client.send_message(f"/battleseed {seed}")
        await self.agent.battle_against(self.rival, n_battles=1)

    def play(self, message: str) -> Battle:
        """Send a choice; returns the battle at the next choice or at its end."""
        self.agent.answer(message)
        return self._next()

    def _next(self) -> Battle:
        try:
            got = self.inbox.get(timeout=self.timeout)
        except queue.Empty:
            raise BattleError(f"the server at {self.url} has not answered for {self.timeout} s") from None
        if isinstance(got, BaseException):
            raise BattleError(f"the battle on {self.url} failed: {got}") from got
        self._finished = got.finished
        return got

    def close(self) -> None:
        """Disconnect both players, which ends the battle."""
        if self._over is not None:
            self._over.cancel()
        for player in (self.agent, self.rival):
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(player.disconnect(), _loop()).result(5.0)
