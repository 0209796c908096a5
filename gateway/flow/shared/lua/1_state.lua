-- State of one pool in Redis, and its access within one call.
--
-- KEYS, all in the slot of {pool}:
--   1 meta      hash: epoch, order, rule, brakes (a share by rank), knobs (of the
--               control loop, see ../control.lua), and numbers that count up (seq, begun, turns, falls, queued1..6,
--               kv, served, fronts, began0..2); members (MessagePack, see below); busy: 1 while a call works, and
--               after one that failed
--   2 tenants   hash: tenant id -> counter, lifts, requests that wait by place, reservation (MessagePack)
--   3 tickets   hash: request id -> a request that waits or runs (MessagePack)
--   4 lines     sorted by name: place, tenant, arrival, request id; the lines of waiting requests
--   5 due       sorted set: tenants that wait and have a reservation, by their tags (seconds)
--   6 ages      sorted set: waiting requests, by when they move up a tier (seconds)
--   7 loads     hash: replica id -> what is in flight there, by rank (MessagePack)
--   8 gateways  hash: gateway id -> its life, its last exchange, its replicas (MessagePack)
--   9 owned     sorted by name: gateway, request id; what leaves with a gateway
--  10 outbox    sorted by name: gateway, request id; turns that their gateway has not confirmed
--  11-16        sorted sets: the tenants that wait in a place, by their standing there
-- Members: a gateway's request goes only to replicas of its gateway's own list, and to none that is out. A gateway that
-- learns that a replica is out (drained, left) or that a life of it is (its engine was replaced) says so first in its
-- next message. From that epoch on nothing is dispatched there for any gateway, whatever it listed (of a life: for those
-- that know the replica in that life), until a gateway says that it is back (resumed, joined), or the one that said so
-- is gone or begins another life: who joins says what is out. The link of one gateway is no matter of the others.
-- A place is a tier's lane: 2 * tier + lane + 1, with lane 0 for ordinary requests and 1 for long ones.
-- Counters are integers below 2^53, which doubles hold exactly. Records are read once and written at the end.

local K = {
  meta = KEYS[1], tenants = KEYS[2], tickets = KEYS[3], lines = KEYS[4], due = KEYS[5], ages = KEYS[6],
  loads = KEYS[7], gateways = KEYS[8], owned = KEYS[9], outbox = KEYS[10],
}
local TIERS, PLACES = 3, 6
local SEPARATOR, AFTER = '\31', '\32'

local function standing_key(place)
  return KEYS[10 + place]
end

local function place_of(tier, lane)
  return 2 * tier + lane + 1
end

local function band_of(place)
  return math.floor((place - 1) / 2)
end

local function lane_of(place)
  return (place - 1) % 2
end

local now_us = clock_us(ARGV[1])
local now_s = now_us / 1000000

-- ---------------------------------------------------------------- scalars of the pool

local meta, changed_meta = {}, {}
do
  local flat = redis.pcall('HGETALL', K.meta)
  for i = 1, #flat, 2 do
    meta[flat[i]] = flat[i + 1]
  end
end

local function set_meta(name, value)
  meta[name], changed_meta[name] = value, value
end

local function number_of(name)
  return tonumber(meta[name] or '0')
end

local function add_to(name, amount)
  local number = number_of(name) + amount
  set_meta(name, text(number))
  return number
end

-- What every call leaves: whose each request is, a line for all that wait, and who stands where. A key that was lost
-- (evicted, deleted) or has another type shows here, before anything goes by it.
local function is_whole()
  local waiting, keys = 0, {K.tenants}
  for place = 1, PLACES do
    local queued = tonumber(meta['queued' .. place] or '0')
    if not queued then
      return false
    end
    waiting = waiting + queued
    keys[#keys + 1] = queued > 0 and standing_key(place) or nil
  end
  local known = redis.pcall('HLEN', K.tickets)
  if redis.pcall('ZCARD', K.owned) ~= known or redis.pcall('ZCARD', K.lines) ~= waiting then
    return false
  end
  keys[#keys + 1] = known > waiting and K.loads or nil
  return known == 0 or redis.call('EXISTS', unpack(keys)) == #keys
end

-- Of a call that failed, half is written. Nothing of such a queue can be relied on: it begins anew, in another epoch,
-- from what its gateways say. So it does where a gateway is refused again and again, unless another one was faster.
if not meta.epoch or meta.busy == '1' or ARGV[7] == 'any' or ARGV[7] == meta.epoch or not is_whole() then
  redis.call('DEL', unpack(KEYS))
  meta = {}
end
redis.call('HSET', K.meta, 'busy', '1')

-- The rule with its knobs (QueueKnobs) where the control loop has them, not where they rest. They rest again once the
-- gateway that decides has been silent for too long.
local function turned(settings)
  local turns = meta.knobs and cmsgpack.unpack(meta.knobs) or {until_us = 0}
  if turns.until_us >= now_us then
    for name in pairs(settings.knobs) do
      settings.knobs[name] = turns[name] or settings.knobs[name]
    end
  end
  return settings
end

local rule = meta.rule and turned(cmsgpack.unpack(meta.rule))
-- Reserved service goes by the settings where a knob leaves less room (Placement.find).
local promised = meta.rule and cmsgpack.unpack(meta.rule)

-- What an operator lets tiers hold, by rank; 1: all (engine/scheduling/brakes.py).
local brakes = meta.brakes and cmsgpack.unpack(meta.brakes) or {1, 1, 1}

-- The members' epoch, and by what is out (a replica, or one life of it) {epoch, gateway that said so, its life}.
local members = meta.members and cmsgpack.unpack(meta.members) or {epoch = 0, out = {}}

local function is_braked(rank)
  return brakes[rank + 1] < 1
end

-- ---------------------------------------------------------------- records

local function records(hash, make)
  local known, changed = {}, {}
  local function get(id, is_there)
    local found = known[id]
    if found == nil then
      local packed = redis.call('HGET', hash, id)
      found = packed and cmsgpack.unpack(packed) or make and not is_there and make(id) or false
      known[id] = found
    end
    return found
  end
  return {
    known = known,
    get = get,
    -- Of what has to be there. Without it the call fails, and the next one begins anew.
    need = function(id)
      return get(id, true) or error(hash .. ' has lost ' .. tostring(id))
    end,
    put = function(id, record)
      known[id], changed[id] = record, true
    end,
    drop = function(id)
      known[id], changed[id] = false, nil
      redis.call('HDEL', hash, id)
    end,
    flush = function()
      for id in pairs(changed) do
        redis.call('HSET', hash, id, cmsgpack.pack(known[id]))
      end
    end,
  }
end

-- By place: `lift`, what is added to the counter there; `stood`, where one that was lowered stood after its
-- last turn; `count`, how many wait; `begun`, when that line began. `asked`: how many wait, by
-- the tier that they asked for; `reserved`: {rate, tier (nil: all), tag_s, running}.
-- `under_way`: in-flight requests; `ended`: what `served` was when the last of them ended; `weight`: of its latest
-- request; `input`, `output`: tokens that wait, by place. `ahead`: by gateway, {in-flight requests, what is charged
-- for them, what of it the tenant did not have}; `heard`: by replica, {its engine's life, the last serial numbers of
-- the tenant's service there, by rank}.
local tenants = records(K.tenants, function()
  return {
    counter = number_of('floor'), lift = {0, 0, 0, 0, 0, 0}, stood = {false, false, false, false, false, false},
    count = {0, 0, 0, 0, 0, 0}, begun = {0, 0, 0, 0, 0, 0}, asked = {0, 0, 0}, reserved = false,
    under_way = 0, ended = false, weight = 1, input = {0, 0, 0, 0, 0, 0}, output = {0, 0, 0, 0, 0, 0},
    ahead = {}, heard = {},
  }
end)
local tickets = records(K.tickets)
local loads = records(K.loads, function()
  return {sequences = {0, 0, 0}, kv = {0, 0, 0}, long_sequences = {0, 0, 0}, long_kv = {0, 0, 0}, live = {}}
end)
local gateways = records(K.gateways)

local function life_of(replica_id, life)
  return replica_id .. SEPARATOR .. (life or '')
end

local function is_out(what)
  local said = members.out[what]
  local by = said and gateways.get(said[2])
  return by and by.life == said[3]
end

local function flush()
  tenants.flush()
  tickets.flush()
  loads.flush()
  gateways.flush()
  local words = {'busy', '0'}
  for name, value in pairs(changed_meta) do
    words[#words + 1], words[#words + 2] = name, value
  end
  redis.call('HSET', K.meta, unpack(words))
end

local function num_waiting(tenant)
  local waiting = 0
  for place = 1, PLACES do
    waiting = waiting + tenant.count[place]
  end
  return waiting
end
