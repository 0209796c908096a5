-- Finds a replica with room for a request, or names what is in the way.
-- (gateway/flow/window.py, lanes.py, placement.py)

local BY_LANE, BY_WINDOW = 'lane', 'window'
local LONG = 1

-- Sequences and KV tokens of a rank and those above it.
local function ahead_of_rank(sequences, kv, rank)
  local of_sequences, of_kv = 0, 0
  for i = 1, rank + 1 do
    of_sequences, of_kv = of_sequences + sequences[i], of_kv + kv[i]
  end
  return of_sequences, of_kv
end

local function add_load(ticket, sequences, kv)
  local load, index = sequences < 0 and loads.need(ticket.replica) or loads.get(ticket.replica), ticket.rank + 1
  load.sequences[index], load.kv[index] = load.sequences[index] + sequences, load.kv[index] + kv
  if ticket.is_long then
    load.long_sequences[index] = load.long_sequences[index] + sequences
    load.long_kv[index] = load.long_kv[index] + kv
  end
  load.live = load.live or {}
  local live = load.live[ticket.tenant] or {0, 0, 0}
  live[index] = live[index] + sequences
  load.live[ticket.tenant] = live[1] + live[2] + live[3] > 0 and live or nil
  loads.put(ticket.replica, load)
  add_to('kv', kv)
end

-- A request larger than the whole window may go when nothing of its rank or above is there: otherwise it would
-- wait for ever. `kept`: room that is kept there for another.
local OWED_PART, OWED_KV_PART = 2, 4
local function window_has_room(replica, ticket, rank, kept, is_owed, is_promised)
  local load = loads.get(replica.id)
  local sequences, kv = ahead_of_rank(load.sequences, load.kv, rank)
  if kept and rank >= kept.rank then
    sequences, kv = sequences + kept.sequences, kv + kept.kv
  end
  local knobs = is_promised and promised.knobs or rule.knobs
  local places, most_kv = replica.max_sequences + knobs.lookahead, replica.kv_tokens * rule.kv_window
  if knobs.batch_cap < 1 then
    places = math.max(1, math.floor(replica.max_sequences * knobs.batch_cap))
  end
  if is_owed and replica.pauses then
    places = places + math.floor(replica.max_sequences / OWED_PART)
    most_kv = most_kv + math.floor(replica.kv_tokens / OWED_KV_PART)
  end
  return sequences == 0 or sequences + ticket.sequences <= places and kv + ticket.kv <= most_kv
end

-- Its tenant's live sequences on a replica, its own included, are at most the tenant's part by weight of the places,
-- among the tenants of its band that run there or wait (ReplicaLoad.is_within_share).
local MAX_SHARING = 256
local function is_within_share(replica, ticket, rank)
  if not replica.pauses or not is_fair() then
    return false
  end
  local running = loads.get(replica.id).live or {}
  local own = running[ticket.tenant]
  local live = ticket.sequences + (own and own[rank + 1] or 0)
  local most, weights, seen = replica.max_sequences * tenants.need(ticket.tenant).weight, 0, {}
  local function fits(tenant_id)
    if not seen[tenant_id] then
      seen[tenant_id] = true
      weights = weights + tenants.need(tenant_id).weight
    end
    return live * weights <= most
  end
  if not fits(ticket.tenant) then
    return false
  end
  for tenant_id, ranks in pairs(running) do
    if ranks[rank + 1] > 0 and not fits(tenant_id) then
      return false
    end
  end
  for lane = 0, 1 do
    local key = standing_key(place_of(rank, lane))
    for _, tenant_id in ipairs(redis.call('ZRANGE', key, 0, MAX_SHARING - 1)) do
      if not fits(tenant_id) then
        return false
      end
    end
  end
  return true
end

-- A request that finds no free place on a replica is owed one by its tenant's part of them.
local function is_owed_at(replica, ticket, rank, lane)
  if lane == LONG then
    return false
  end
  local load = loads.get(replica.id)
  local sequences, kv = ahead_of_rank(load.sequences, load.kv, rank)
  local has_place = sequences + ticket.sequences <= replica.max_sequences
    and kv + ticket.kv <= replica.kv_tokens * rule.kv_window
  return not has_place and is_within_share(replica, ticket, rank)
end

local function brake_has_room(replica, ticket, rank)
  local load, share = loads.get(replica.id), brakes[rank + 1]
  local sequences, kv = load.sequences[rank + 1], load.kv[rank + 1]
  return share == 1 or sequences == 0
    or sequences + ticket.sequences <= math.max(1, math.floor(replica.max_sequences * share))
      and kv + ticket.kv <= math.max(1, math.floor(replica.kv_tokens * share))
end

-- LaneRule.has_room (gateway/flow/lanes.py), by the knobs or by the settings.
local function lane_has_room(settings, replica, ticket, rank, sequences, kv)
  local of_sequences, of_kv = settings.knobs.long_share, settings.share_kv
  if rank >= TIERS - 1 then
    of_sequences, of_kv = settings.knobs.batch_share, settings.knobs.batch_share
  elseif of_sequences ~= promised.knobs.long_share then
    of_kv = of_sequences
  end
  return (of_sequences == 1
      or sequences + ticket.sequences <= math.max(1, math.floor(replica.max_sequences * of_sequences)))
    and (of_kv == 1 or kv + ticket.kv <= replica.kv_tokens * of_kv)
end

-- It is not out, can do what the request needs, and the request's tier, by its brake, and its lane may hold this much more of it.
local function may_hold(replica, ticket, rank, lane, is_promised)
  local lives = gateways.need(ticket.gateway).lives
  if is_out(replica.id) or is_out(life_of(replica.id, lives[replica.id])) then
    return false
  end
  if ticket.unfit and ticket.unfit[replica.id] then
    return false
  end
  if not brake_has_room(replica, ticket, rank) then
    return false
  end
  if lane ~= LONG then
    return true
  end
  local load = loads.get(replica.id)
  local sequences, kv = ahead_of_rank(load.long_sequences, load.long_kv, rank)
  if sequences == 0 then
    return true
  end
  return lane_has_room(rule, replica, ticket, rank, sequences, kv)
    or is_promised and lane_has_room(promised, replica, ticket, rank, sequences, kv)
end

-- Score: work of its rank and above, then all work, per place; the smaller the better.
local function least_loaded(replica, rank)
  local load = loads.get(replica.id)
  local ahead, all = ahead_of_rank(load.sequences, load.kv, rank), ahead_of_rank(load.sequences, load.kv, TIERS - 1)
  return {ahead / replica.max_sequences, all / replica.max_sequences, replica.id}
end

local function is_less(one, other)
  for i = 1, #one do
    if one[i] ~= other[i] then
      return one[i] < other[i]
    end
  end
  return false
end

-- Of replicas with room, the one whose prefix cache probably holds most of the prompt, unless it has more than
-- MAX_IMBALANCE (times the knob) more of its places in use than the emptiest; of equals the least loaded.
local MAX_IMBALANCE = 0.5
local function best_of(roomy, ticket, rank)
  local scores, emptiest, weight = {}, nil, rule.knobs.prefix_weight
  for i, replica in ipairs(roomy) do
    scores[i] = least_loaded(replica, rank)
    emptiest = math.min(emptiest or scores[i][1], scores[i][1])
  end
  local best
  for i, replica in ipairs(roomy) do
    local cached = ticket.cached and ticket.cached[replica.id] or 0
    local counts = weight > 0 and scores[i][1] <= emptiest + MAX_IMBALANCE * weight
    table.insert(scores[i], 1, counts and -cached or 0)
    if not best or is_less(scores[i], scores[best]) then
      best = i
    end
  end
  return roomy[best]
end

-- A replica, or nil and what is in the way. `by_order`: not by a reservation, whose service is promised.
local function find(ticket, rank, lane, kept, is_owed, by_order)
  local replicas = gateways.need(ticket.gateway).replicas
  local roomy, blocked = {}, #replicas > 0 and BY_LANE or BY_WINDOW
  for _, replica in ipairs(replicas) do
    if may_hold(replica, ticket, rank, lane, not by_order) then
      local kept_here = kept[replica.id]
      if window_has_room(replica, ticket, rank, kept_here, is_owed)
        or by_order and is_owed_at(replica, ticket, rank, lane)
          and window_has_room(replica, ticket, rank, kept_here, true)
        or not by_order and window_has_room(replica, ticket, rank, kept_here, false, true) then
        roomy[#roomy + 1] = replica
      else
        blocked = BY_WINDOW
      end
    end
  end
  if #roomy == 0 then
    return nil, blocked
  end
  return best_of(roomy, ticket, rank)
end

-- Keeps the room for a request that found none, on the least loaded replica that is not kept yet.
local function keep_room(ticket, rank, lane, kept, is_promised)
  local best, best_score
  for _, replica in ipairs(gateways.need(ticket.gateway).replicas) do
    if not kept[replica.id] and may_hold(replica, ticket, rank, lane, is_promised) then
      local score = least_loaded(replica, rank)
      if not best or is_less(score, best_score) then
        best, best_score = replica.id, score
      end
    end
  end
  if best then
    kept[best] = {rank = rank, sequences = ticket.sequences, kv = ticket.kv}
  end
end
