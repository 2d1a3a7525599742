// Runs a Pokemon Showdown server that nobody outside this machine can reach: one process, no files written, a port that the
// system chooses. It ends when its standard input does, so it cannot outlive the process that started it.
//
//     node showdown.js FOLDER_OF_POKEMON_SHOWDOWN
'use strict';

const childProcess = require('child_process');
const fs = require('fs');
const http = require('http');
const Module = require('module');
const path = require('path');

const root = fs.realpathSync(process.argv[2]);
const CONFIG = path.join(root, 'config', 'config.js');

process.stdin.on('end', () => process.exit(0)).on('error', () => process.exit(0)).resume();

const seeds = new Map(); // user id -> seed of the next battle in which that user is the first player

// A battle with a seed of ours ("gen5,...", where the server itself would draw "sodium,...") draws its teams from it, too.
function addSeeds() {
	const create = Rooms.createBattle;
	Rooms.createBattle = function (options) {
		const user = options.players[0] && options.players[0].user;
		if (user && seeds.has(user.id)) {
			options.seed = seeds.get(user.id);
			seeds.delete(user.id);
		}
		return create.call(this, options);
	};
	const { Battle } = require(path.join(root, 'dist', 'sim', 'battle.js'));
	const { PRNG } = require(path.join(root, 'dist', 'sim', 'prng.js'));
	const getTeam = Battle.prototype.getTeam;
	Battle.prototype.getTeam = function (options) {
		if (!options.team && !options.seed && this.prngSeed.startsWith('gen5,')) {
			this.amagoTeams = this.amagoTeams || new PRNG(this.prngSeed);
			options.seed = [0, 0, 0, 0].map(() => this.amagoTeams.random(0x10000)).join(',');
		}
		return getTeam.call(this, options);
	};
}

// A finished battle is kept for many minutes, for people who might still look at it; here that is a leak.
function forgetFinishedBattles() {
	for (const room of [...Rooms.rooms.values()]) {
		if (room.battle && room.battle.ended && !Object.keys(room.users).length) room.destroy();
	}
}

const config = {
	port: 0,
	bindaddress: '127.0.0.1',
	subprocesses: 0,
	nofswriting: true,
	repl: false,
	watchconfig: false,
	backdoor: false,
	consoleips: [],
	loginserver: 'http://127.0.0.1:1/', // where nobody answers
	nothrottle: true,
	noipchecks: true,
	noguestsecurity: true,
	reportjoins: false,
	reportbattles: false,
	reportbattlejoins: false,
	commands: { // of the chat: /battleseed gen5,0123456789abcdef
		battleseed(target, room, user) {
			seeds.set(user.id, target.trim());
		},
	},
	startuphook() {
		try {
			Chat.loadPlugins();
			Rooms.global.formatList = '|formats'; // to list all formats, with their rules, takes seconds and 200 MB
			addSeeds();
			setInterval(forgetFinishedBattles, 2000).unref();
		} catch (err) {
			console.error(err);
			process.exit(1);
		}
		console.log('amago: ready');
	},
};

// It would look for Python, and run `git add` and `git reset` in whatever repository it lies in, to learn its own version.
for (const name of ['exec', 'execFile', 'execFileSync', 'execSync', 'fork', 'spawn', 'spawnSync']) {
	childProcess[name] = (...args) => {
		const error = new Error(`this server starts no processes, but ${name} was called`);
		const callback = args[args.length - 1];
		if (typeof callback !== 'function') throw error;
		process.nextTick(callback, error, '', '');
	};
}

// The settings are handed over here, so that no file has to be written into the package.
const load = Module._load;
Module._load = function (request, ...rest) {
	return request === CONFIG ? config : load.call(this, request, ...rest);
};

const listen = http.Server.prototype.listen;
http.Server.prototype.listen = function (...args) {
	this.once('listening', () => console.log(`amago: port ${this.address().port}`));
	this.once('error', err => {
		console.error(err);
		process.exit(1);
	});
	return listen.apply(this, args);
};

process.argv = [process.argv[0], 'pokemon-showdown', 'start'];
load(path.join(root, 'dist', 'server', 'index.js'), module, false);
