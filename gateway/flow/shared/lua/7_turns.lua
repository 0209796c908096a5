-- Dispatch: the loop of gateway/flow/dispatch_rules.py over the state in Redis.

local RESERVED_RANK = 0
local own = ARGV[3]
local woken = {}
-- By gateway, the turns of others than the caller.

-- As codec.GivenTurn.
local function turn_of(id, ticket)
  return {
    id, ticket.life, ticket.replica, ticket.rank, ticket.reserved, ticket.turn, ticket.falls, ticket.counter,
    ticket.place_counter, ticket.is_owed, ticket.had, ticket.heard, ticket.engine_life,
  }
end

-- The first of each lane of a band, in order of dispatch.
local function heads(band)
  local found = {}
  for lane = 0, 1 do
    local place = place_of(band, lane)
    local id = head(place)
    if id then
      local ticket = tickets.need(id)
      local stands = is_fair() and counter_in(tenants.need(ticket.tenant), place) or 0
      found[#found + 1] = {stands, ticket.arrived_us, lane, id}
    end
  end
  if #found == 2 and is_less(found[2], found[1]) then
    found[1], found[2] = found[2], found[1]
  end
  return found
end

-- The first of a band's ordinary lane is of a tenant that has had less than its share: see RequestQueue.is_owed
-- (gateway/flow/queue.py).
local function is_owed(ticket, band)
  local began = meta['began' .. band]
  return began ~= nil and is_fair()
    and counter_in(tenants.need(ticket.tenant), ticket.place) + scaled(ticket.cost, ticket.weight) <= tonumber(began)
end

local function give_turn(id, ticket, replica, rank, is_reserved, owed)
  local place, tenant_id = ticket.place, ticket.tenant
  if not is_reserved and not owed and lane_of(place) ~= LONG then
    set_meta('began' .. band_of(place), text(counter_in(tenants.need(tenant_id), place)))
  end
  step_out(id, ticket)
  local tenant = tenants.need(tenant_id)
  begin_ahead(tenant, ticket.gateway)
  charge(tenant_id, ticket.weight, ticket.cost, ticket.gateway)
  tenant.under_way = tenant.under_way + 1
  tenants.put(tenant_id, tenant)
  count_asked(tenant_id, ticket.tier, -1)
  if is_reserved then
    reservation_granted(tenant_id, ticket.cost)
  end
  if tenant.stood[place] then
    tenant.stood[place] = counter_in(tenant, place)
  end
  ticket.runs, ticket.replica, ticket.rank, ticket.reserved = true, replica.id, rank, is_reserved
  ticket.is_owed = owed
  ticket.is_long, ticket.charged = lane_of(place) == LONG, ticket.cost
  ticket.output, ticket.live, ticket.kv_now = 0, ticket.sequences, ticket.kv
  add_load(ticket, ticket.live, ticket.kv_now)
  ticket.turn, ticket.falls = add_to('turns', 1), number_of('falls')
  ticket.counter, ticket.place_counter = tenant.counter, counter_in(tenant, place)
  ticket.had = ticket.place_counter - ahead_of(tenant)
  local heard = tenant.heard and tenant.heard[replica.id] or {''}
  ticket.engine_life, ticket.heard = heard[1], heard[2 + rank] or 0
  if is_reserved then
    -- At the engine it must not stand behind requests that wait here: those would be sent for ever.
    for _, each in ipairs(heads(RESERVED_RANK)) do
      local waiting = tickets.need(each[4])
      local lowest = counter_in(tenants.need(waiting.tenant), waiting.place)
      ticket.place_counter = math.min(ticket.place_counter, lowest)
    end
    ticket.had = math.min(ticket.had, ticket.place_counter)
  end
  tickets.put(id, ticket)
  redis.call('ZADD', K.outbox, 0, ticket.gateway .. SEPARATOR .. id)
  if ticket.gateway ~= own then
    local turns = woken[ticket.gateway] or {}
    turns[#turns + 1] = turn_of(id, ticket)
    woken[ticket.gateway] = turns
  end
  local last_us = number_of('last_us')
  if last_us > 0 then
    local interval_s = tonumber(meta.interval_s or '1')
    local gap_s = (now_us - last_us) / 1000000
    set_meta('interval_s', string.format('%.17g', interval_s + 0.1 * (gap_s - interval_s)))
  end
  set_meta('last_us', text(now_us))
end

-- A tenant's own first of each band and lane that its reservation is for, the highest band first, lanes by arrival.
local function firsts_of(tenant_id)
  local tenant, firsts = tenants.need(tenant_id), {}
  for place = 1, PLACES do
    local id = tenant.count[place] > 0 and next_of(place, tenant_id, tenant.reserved.tier)
    if id then
      firsts[#firsts + 1] = {band_of(place), tickets.need(id).arrived_us, lane_of(place), id}
    end
  end
  table.sort(firsts, is_less)
  return firsts
end

local function give_due(kept)
  local passed_over, tenant_id = {}, nil
  while true do
    tenant_id = first_due(passed_over)
    if not tenant_id then
      return
    end
    local is_over = true
    for _, first in ipairs(firsts_of(tenant_id)) do
      local lane, id = first[3], first[4]
      local ticket = tickets.need(id)
      local replica, blocked = find(ticket, RESERVED_RANK, lane, kept)
      if replica then
        give_turn(id, ticket, replica, RESERVED_RANK, true, false)
        is_over = false
        break
      elseif blocked == BY_WINDOW then
        keep_room(ticket, RESERVED_RANK, lane, kept, true)
        break
      end
    end
    passed_over[tenant_id] = is_over or nil
  end
end

local function give_by_order(kept)
  for band = 0, TIERS - 1 do
    local held_back = {}
    while true do
      local first
      for _, each in ipairs(heads(band)) do
        if not held_back[each[3]] then
          first = each
          break
        end
      end
      if not first then
        break
      end
      local lane, id = first[3], first[4]
      local ticket = tickets.need(id)
      local owed = lane ~= LONG and is_owed(ticket, band)
      local replica, blocked = find(ticket, band, lane, kept, owed, true)
      if replica then
        owed = owed or is_owed_at(replica, ticket, band, lane)
        give_turn(id, ticket, replica, band, false, owed)
      elseif blocked == BY_WINDOW and lane ~= LONG then
        return
      else
        held_back[lane] = true
        if blocked == BY_WINDOW then
          keep_room(ticket, band, lane, kept)
        end
      end
    end
  end
end

local held_us = 0
-- How long nothing is dispatched, see 9_exchange.lua.

local function give_turns()
  if held_us > 0 then
    return
  end
  local kept = {}
  age()
  give_due(kept)
  give_by_order(kept)
end
