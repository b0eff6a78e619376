# What every node needs in its environment, before `ray start`: actors inherit it. The shells of
# the nodes source this file (see setup_commands), so it is the one place to change.
export PATH="$HOME/pd-cluster/.venv/bin:$PATH"
# All of Ray's ports ask for the token in ~/.ray/auth_token.
export RAY_AUTH_MODE=token
# Ray would run our workers at the lowest priority but four.
export RAY_worker_niceness=0
export RAY_USAGE_STATS_ENABLED=0
# Seconds for which a node waits for a head that is gone, before it ends its own processes. Ray gives
# up a node that it cannot reach after as long.
export RAY_gcs_rpc_server_reconnect_timeout_s=20

# How pages travel between hosts (docs/deploy.md, "Fabrics"). Unset, UCX takes the fastest that it
# finds on all devices: right for most InfiniBand and RoCE hosts.
# export UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1         # CHANGE on hosts with several networks
# export UCX_TLS=tcp,self                          # CHANGE where there is plain Ethernet only (GPUs: tcp,self,cuda)
