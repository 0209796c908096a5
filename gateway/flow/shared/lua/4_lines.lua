-- The lines of waiting requests. In each place the order between tenants is the pool's: vtc (the smallest
-- counter; engine/scheduling/order/vtc.py) or fcfs (the earliest arrival); a tenant's own go by arrival.

local function line_of(place, tenant_id)
  return place .. SEPARATOR .. tenant_id .. SEPARATOR
end

local function member_of(ticket, id)
  local at = string.format('%017.0f%013.0f', ticket.arrived_us, ticket.number)
  return line_of(ticket.place, ticket.tenant) .. at .. SEPARATOR .. id
end

local function id_of(member)
  return string.match(member, '[^' .. SEPARATOR .. ']*$')
end

-- A tenant's first in a place, nil where none waits.
local function first_of(place, tenant_id)
  local line = line_of(place, tenant_id)
  local found = redis.call('ZRANGEBYLEX', K.lines, '[' .. line, '(' .. line .. '\127', 'LIMIT', 0, 1)
  return found[1] and id_of(found[1])
end

-- What a waiting tenant is ranked by.
local function standing(tenant_id, tenant, place)
  if is_fair() then
    return counter_in(tenant, place)
  end
  return tickets.get(first_of(place, tenant_id)).arrived_us
end

-- The next request of a place, nil where none waits: of the tenants with the lowest standing the one whose
-- first request arrived first; of those, the one whose line is oldest.
local function head(place)
  local lowest = redis.call('ZRANGE', standing_key(place), 0, 1, 'WITHSCORES')
  if #lowest == 0 then
    return nil
  elseif #lowest == 2 or lowest[2] ~= lowest[4] then
    return first_of(place, lowest[1])
  end
  local best, best_at, best_begun
  for _, tenant_id in ipairs(redis.call('ZRANGEBYSCORE', standing_key(place), lowest[2], lowest[2])) do
    local id = first_of(place, tenant_id)
    local first, begun = tickets.get(id), tenants.get(tenant_id).begun[place]
    begun = is_fair() and begun or first.number
    if not best or first.arrived_us < best_at or (first.arrived_us == best_at and begun < best_begun) then
      best, best_at, best_begun = id, first.arrived_us, begun
    end
  end
  return best
end

-- How far below the others a returning tenant may stand: see InFlightRequests.lag (gateway/flow/in_flight.py).
local function lag(tenant)
  local most = number_of('kv') * rule.output_cost
  local is_here = tenant.under_way > 0 or tenant.ended and number_of('served') - tenant.ended < most
  return is_here and rounded(most * SCALE / tenant.weight) or 0
end

-- Counts a request that joins a place (1) or leaves it (-1), with its tokens as predicted.
local function count(tenant, ticket, sign)
  local place = ticket.place
  tenant.count[place] = tenant.count[place] + sign
  tenant.input[place] = tenant.input[place] + sign * (ticket.cost - rule.output_cost * ticket.predicted)
  tenant.output[place] = tenant.output[place] + sign * ticket.predicted
end

local function lift_to(tenant, place, to)
  local lifted = to and to - lag(tenant)
  if lifted and lifted > counter_in(tenant, place) then
    tenant.lift[place] = lifted - tenant.counter
  end
end

-- Where the tenant of a waiting request stands.
local function counter_of(id, place)
  return id and counter_in(tenants.get(tickets.get(id).tenant), place)
end

-- Lifts a tenant that was idle in a place: to the standing of the first of the others there, or of the one that
-- left last, less its lag; where none waits, to that of the first of the tier's other lane. So idle time earns
-- nothing.
local function lift(tenant, place, first, other)
  if first then
    lift_to(tenant, place, counter_of(first, place))
    return
  end
  lift_to(tenant, place, other)
  local left = meta['left' .. place] or ''
  if left ~= '' then
    lift_to(tenant, place, counter_in(tenants.get(left), place))
  end
end

-- Places a tenant whose request was moved up by ageing: at the standing of the first of the others, but not
-- below where its last turn here left it.
local function lower(tenant, place, to)
  to = math.max(to, tenant.stood[place] or to)
  if to < counter_in(tenant, place) then
    tenant.lift[place], tenant.stood[place] = to - tenant.counter, to
  end
end

-- `first`: the first request of the place (nil: none).
local function join_line(id, ticket, first, has_aged)
  local place, tenant_id = ticket.place, ticket.tenant
  local tenant = tenants.get(tenant_id)
  if tenant.count[place] == 0 then
    local other_place = place_of(band_of(place), 1 - lane_of(place))
    local other = not first and counter_of(head(other_place), other_place)
    if is_fair() then
      lift(tenant, place, first, other)
    end
    if has_aged and (first or other) then
      lower(tenant, place, counter_of(first, place) or other)
    end
    tenant.begun[place] = add_to('begun', 1)
  end
  count(tenant, ticket, 1)
  tenants.put(tenant_id, tenant)
  redis.call('ZADD', K.lines, 0, member_of(ticket, id))
  redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
  add_to('queued' .. place, 1)
end

local function leave_line(id, ticket)
  local place, tenant_id = ticket.place, ticket.tenant
  local tenant = tenants.get(tenant_id)
  redis.call('ZREM', K.lines, member_of(ticket, id))
  count(tenant, ticket, -1)
  tenants.put(tenant_id, tenant)
  if tenant.count[place] == 0 then
    redis.call('ZREM', standing_key(place), tenant_id)
    set_meta('left' .. place, tenant_id)
  elseif not is_fair() then
    redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
  end
  add_to('queued' .. place, -1)
end

-- Changes the order of all that wait. No tenant was idle, so none is lifted.
local function set_order(name)
  set_meta('order', name)
  for place = 1, PLACES do
    set_meta('left' .. place, '')
    local firsts = {}
    for _, tenant_id in ipairs(redis.call('ZRANGE', standing_key(place), 0, -1)) do
      local first = tickets.get(first_of(place, tenant_id))
      firsts[#firsts + 1] = {first.arrived_us, first.number, tenant_id}
    end
    table.sort(firsts, function(one, other)
      return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
    end)
    for _, first in ipairs(firsts) do
      local tenant_id = first[3]
      local tenant = tenants.get(tenant_id)
      tenant.begun[place] = add_to('begun', 1)
      tenants.put(tenant_id, tenant)
      redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
    end
  end
end
