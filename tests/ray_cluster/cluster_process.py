"""A Ray cluster of nodes on this machine, which does what its standard input says: "add NAME", "remove NAME". It ends with its parent.

Argument: the port of its head; one that is free if there is none.
"""

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}


def variables(name):
    """Each node has another value of the variable, from which its directory follows."""
    return {"env_vars": {"AMAGO_TEST_NODE": name}}


port = {"gcs_server_port": int(sys.argv[1])} if len(sys.argv) > 1 else {}
cluster = Cluster(initialize_head=True, head_node_args=NODE | variables("head") | port)
nodes = {}
print(cluster.address, flush=True)
for line in sys.stdin:
    order, name = line.split()
    if order == "add":
        nodes[name] = cluster.add_node(**NODE, **variables(name))
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
