"""rollout CPU time: 16 CartPoles, sync, one thread; npz vs segments in turns within one run"""
import sys, time, tempfile, shutil, torch, numpy as np, gymnasium as gym
torch.set_num_threads(1)
from benchmarks.policy_step import make_agent, CARTPOLE_OBS
from amago.envs import AMAGOEnv
from amago.envs.pool import make_pool
from amago.run.rollout import Rollout
import contextlib
def env(): return AMAGOEnv(gym.make("CartPole-v1"), env_name="CartPole")
traj=sys.argv[1]; kinds=["npz","segments",None]
root=tempfile.mkdtemp(dir=sys.argv[2])
rolls={}
for k in kinds:
    agent=make_agent(traj,32,False)
    pool=make_pool([env]*16,env_mode="sync",parallel_actors=16,recorder=None if k is None else {"save_trajs_to":f"{root}/{k}","save_trajs_as":k},seed=np.random.SeedSequence(1))
    r=Rollout(pool,torch.device("cpu"),contextlib.nullcontext); r.reset(); rolls[k]=(r,agent)
res={k:[] for k in kinds}; wall={k:[] for k in kinds}
for rnd in range(7):
    for k in (kinds if rnd%2 else kinds[::-1]):
        r,a=rolls[k]; t=time.process_time(); w=time.perf_counter()
        r.run_phase(a,100,True); r.pool.flush()
        res[k].append(100*16/(time.process_time()-t)); wall[k].append(100*16/(time.perf_counter()-w))
for n,d in (("cpu",res),("wall",wall)): print(traj,n,{k:round(float(np.median(v))) for k,v in d.items()}, "segments/npz %.2f"%np.median(np.array(d["segments"])/np.array(d["npz"])))
for r,_ in rolls.values(): r.pool.close()
shutil.rmtree(root)
