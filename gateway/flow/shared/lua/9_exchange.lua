-- One exchange: applies everything that happened at one gateway since its last one, and returns its turns.
-- ARGV: now_us (0: the server's clock), epoch, gateway id, life, number of this message, then as MessagePack:
--   {replicas, confirmed turns, acts, then where it joins {rule, order, brakes, returns}, where it leaves 'leaves'},
--   and the epoch that ends with this message ('any': every one, '': none), see 1_state.lua
-- A message that was applied already (its answer was lost) changes nothing. Before one that is too new another is
-- missing: a replica took over that did not have it yet. The caller joins again, with everything that it has.

local MAX_PAST = 8
local epoch, life, number = ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local replicas, confirmed, to_do, passage = unpack(cmsgpack.unpack(ARGV[6]))
local joins = type(passage) == 'table' and passage

-- Earlier lives of a gateway, the last first: their messages are late copies.
local past = {}
if joins then
  local known = gateways.get(own)
  for i, lived in ipairs(known and {known.life, unpack(known.past or {})} or {}) do
    joins = lived ~= life and joins
    past[i] = i <= MAX_PAST and lived or nil
  end
end

-- The request ids of a set that is sorted by gateway.
local function of_gateway(set, gateway)
  local prefix, ids = gateway .. SEPARATOR, {}
  for i, name in ipairs(redis.call('ZRANGEBYLEX', set, '[' .. prefix, '(' .. gateway .. AFTER)) do
    ids[i] = string.sub(name, #prefix + 1)
  end
  return ids
end

-- Everything of a gateway leaves: what waits, and what runs with the charge that it has.
local function leave_all(gateway)
  for _, id in ipairs(of_gateway(K.owned, gateway)) do
    local ticket = tickets.need(id)
    if ticket.runs then
      stop(id, ticket)
    else
      leave(id, ticket)
    end
  end
end

-- Gateways that were silent for too long count as dead.
local function bury()
  for _, id in ipairs(redis.call('HKEYS', K.gateways)) do
    if id ~= own and now_us - gateways.get(id).seen_us > rule.stale_us then
      leave_all(id)
      gateways.drop(id)
    end
  end
end

local function is_first()
  for _, id in ipairs(redis.call('HKEYS', K.gateways)) do
    if id ~= own and now_us - gateways.get(id).seen_us <= rule.stale_us then
      return false
    end
  end
  return true
end

if joins then
  set_meta('rule', cmsgpack.pack(joins.rule))
  rule, promised = turned(joins.rule), cmsgpack.unpack(meta.rule)
  if not meta.epoch then
    set_meta('epoch', text(now_us))
    redis.call('PUBLISH', K.meta, own)
    if joins.returns then
      -- Everything was lost: in-flight requests of other gateways take up room, too, and must be reported first.
      set_meta('held_until_us', text(now_us + rule.hold_us))
    end
  end
  if is_first() then
    acts.order(joins.order)
  end
  leave_all(own)
  acts.brakes(joins.brakes)
  gateways.put(own, {life = life, number = 0, past = past, seen_us = now_us, replicas = replicas, lives = {}})
end
local me = meta.epoch and gateways.get(own)
local is_behind = me and not joins and passage ~= 'leaves' and number > me.number + 1
if not me or me.life ~= life or is_behind or (not joins and meta.epoch ~= epoch) then
  redis.call('HSET', K.meta, 'busy', '0')
  return cmsgpack.pack({'lost', meta.epoch or '', now_us, {}, {}, {}, {}, 0, '', 0})
end

held_us = math.max(0, number_of('held_until_us') - now_us)
follow_ageing()

-- After a gap of its own (Redis stood still) the caller first gives the others time for a heartbeat.
local was_in_touch = now_us - me.seen_us <= rule.stale_us / 2
me.seen_us, me.replicas = now_us, replicas
gateways.put(own, me)
if number > me.number then
  me.number, me.is_joining = number, joins and true
  for _, id in ipairs(confirmed) do
    redis.call('ZREM', K.outbox, own .. SEPARATOR .. id)
  end
  for _, act in ipairs(to_do) do
    acts[act[1]](unpack(act, 2))
  end
  me.is_joining = nil
end
if was_in_touch then
  bury()
end
give_turns()
local turns = {}
for i, id in ipairs(of_gateway(K.outbox, own)) do
  turns[i] = turn_of(id, tickets.need(id))
end
if passage == 'leaves' then
  leave_all(own)
  gateways.drop(own)
  give_turns()
end
rebase()
forget(rule.max_tenants)

local counters, queued = {}, {}
for id, tenant in pairs(tenants.known) do
  if tenant then
    counters[#counters + 1] = {id, tenant.counter}
  end
end
for place = 1, PLACES do
  queued[place] = number_of('queued' .. place)
end
flush()
for gateway, given in pairs(woken) do
  redis.call('PUBLISH', K.meta .. ':' .. gateway, cmsgpack.pack(given))
end
return cmsgpack.pack({'ok', meta.epoch, now_us, turns, refused, counters, queued, number_of('falls'), meta.order, held_us})
