-- The lines of waiting requests. In each place the order between tenants is the pool's: vtc and hybrid (the smallest
-- counter; engine/scheduling/order/vtc.py) or fcfs (the earliest arrival). A tenant's own go by arrival; with hybrid
-- the one with the highest response ratio goes next (hrrn.py), of the first MOST_COMPARED of its line. What was put back
-- (`front`, a number) stands before all that was not, the last one first.

local function line_of(place, tenant_id)
  return place .. SEPARATOR .. tenant_id .. SEPARATOR
end

local function member_of(ticket, id)
  local at = string.format('%017.0f%013.0f', ticket.arrived_us, ticket.number)
  if ticket.front then
    at = string.format('-%013.0f', 10 ^ 12 - ticket.front) -- sorts before digits
  end
  return line_of(ticket.place, ticket.tenant) .. at .. SEPARATOR .. id
end

local function id_of(member)
  return string.match(member, '[^' .. SEPARATOR .. ']*$')
end

-- A tenant's first requests in a place, at most so many, by arrival: all, or those that asked for a tier.
local function firsts_in(place, tenant_id, most, tier)
  local line, ids = line_of(place, tenant_id), {}
  local limit = tier and -1 or most
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.lines, '[' .. line, '(' .. line .. '\127', 'LIMIT', 0, limit)) do
    local id = id_of(member)
    if not tier or tickets.need(id).tier == tier then
      ids[#ids + 1] = id
      if #ids == most then
        break
      end
    end
  end
  return ids
end

-- A tenant's first in a place, nil where none waits.
local function first_of(place, tenant_id, tier)
  return firsts_in(place, tenant_id, 1, tier)[1]
end

local MOST_COMPARED, CLASSES_PER_DOUBLING = 64, 4

local function class_of(ticket)
  local size = math.max(1, ticket.cost - rule.output_cost * ticket.predicted)
  return math.floor(CLASSES_PER_DOUBLING * math.log(size) / math.log(2)), size
end

-- Since when (by `served`) one that was put back has waited: as before it ran, and no less than the first of its size,
-- which it stands before.
local function joined_at_front(ticket, joined)
  for _, id in ipairs(firsts_in(ticket.place, ticket.tenant, MOST_COMPARED)) do
    local other = tickets.need(id)
    if class_of(other) == class_of(ticket) then
      return math.min(joined, other.joined)
    end
  end
  return joined
end

-- The tenant's next in a place: of requests of about the same size the first, of those the one that others were
-- served most meanwhile, for its size. Of all that wait there, or of those that asked for `tier`.
local function next_of(place, tenant_id, tier)
  if meta.order ~= 'hybrid' then
    return first_of(place, tenant_id, tier)
  end
  local clock, since = number_of('served'), number_of('hybrid_since')
  local best, highest, seen = nil, -1, {}
  for _, id in ipairs(firsts_in(place, tenant_id, MOST_COMPARED, tier)) do
    local ticket = tickets.need(id)
    local class, size = class_of(ticket)
    if not seen[class] then
      seen[class] = true
      local ratio = math.max(0, clock - math.max(ticket.joined or 0, since)) / size
      if ratio > highest then
        best, highest = id, ratio
      end
    end
  end
  return best
end

-- What a waiting tenant is ranked by.
local function standing(tenant_id, tenant, place)
  if is_fair() then
    return counter_in(tenant, place)
  end
  local first = tickets.need(first_of(place, tenant_id))
  return first.front and -first.front or first.arrived_us
end

-- The next request of a place, nil where none waits: of the tenants with the lowest standing the one whose
-- first request arrived first (with hybrid none is preferred so); of those, the one whose line is oldest.
local function head(place)
  local lowest = redis.call('ZRANGE', standing_key(place), 0, 1, 'WITHSCORES')
  if #lowest == 0 then
    return nil
  elseif #lowest == 2 or lowest[2] ~= lowest[4] then
    return next_of(place, lowest[1]) or error(standing_key(place) .. ' has one that does not wait: ' .. lowest[1])
  end
  local best, best_at, best_begun
  for _, tenant_id in ipairs(redis.call('ZRANGEBYSCORE', standing_key(place), lowest[2], lowest[2])) do
    local id = next_of(place, tenant_id)
    local first, begun = tickets.need(id), tenants.need(tenant_id).begun[place]
    begun = is_fair() and begun or first.number
    local at = meta.order == 'hybrid' and 0 or first.arrived_us
    if not best or at < best_at or (at == best_at and begun < best_begun) then
      best, best_at, best_begun = id, at, begun
    end
  end
  return best
end

-- How far below another a tenant may stand that comes into an empty line: see InFlightRequests.lag and below
-- (gateway/flow/in_flight.py).
local function lag(tenant, other)
  local most = number_of('kv') * rule.output_cost
  local is_here = tenant.under_way > 0 or tenant.ended and number_of('served') - tenant.ended < most
  return math.max(is_here and scaled(most, tenant.weight) or 0, ahead_of(other), other.under_way > 0 and 1 or 0)
end

-- Counts a request that joins a place (1) or leaves it (-1), with its tokens as predicted.
local function count(tenant, ticket, sign)
  local place = ticket.place
  tenant.count[place] = tenant.count[place] + sign
  tenant.input[place] = tenant.input[place] + sign * (ticket.cost - rule.output_cost * ticket.predicted)
  tenant.output[place] = tenant.output[place] + sign * ticket.predicted
end

local function raise_to(tenant, place, to)
  if to > counter_in(tenant, place) then
    tenant.lift[place] = to - tenant.counter
  end
end

-- To where another tenant stands in the other's place, less its lag.
local function lift_to(tenant, place, other, other_place)
  local to = counter_in(other, other_place)
  if to > counter_in(tenant, place) then
    raise_to(tenant, place, to - lag(tenant, other))
  end
end

-- The tenant of a waiting request, and where it stands.
local function tenant_of(id)
  return id and tenants.need(tickets.need(id).tenant)
end

local function counter_of(id, place)
  return id and counter_in(tenant_of(id), place)
end

-- Lifts a tenant that was idle in a place: to the standing of the first of the others there, or of the one that
-- left last, less its lag; where none waits, to that of the first of the tier's other lane. So idle time earns
-- nothing.
local function lift(tenant, place, first, other, other_place)
  if first then
    lift_to(tenant, place, tenant_of(first), place)
    return
  end
  if other then
    lift_to(tenant, place, tenant_of(other), other_place)
  end
  local left = meta['left' .. place] or ''
  if left ~= '' then
    lift_to(tenant, place, tenants.get(left), place)
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

-- `first`: the first request of the place (nil: none). `back_since`: it was put back, and had joined at that time (by
-- `served`): its tenant was not idle.
local function join_line(id, ticket, first, has_aged, back_since)
  local place, tenant_id = ticket.place, ticket.tenant
  local tenant = tenants.get(tenant_id)
  if tenant.count[place] == 0 then
    local other_place = place_of(band_of(place), 1 - lane_of(place))
    local other = not first and head(other_place)
    if is_fair() and not back_since then
      lift(tenant, place, first, other, other_place)
    end
    if has_aged and (first or other) then
      lower(tenant, place, counter_of(first, place) or counter_of(other, other_place))
    end
    tenant.begun[place] = add_to('begun', 1)
  end
  count(tenant, ticket, 1)
  tenants.put(tenant_id, tenant)
  ticket.joined = back_since and joined_at_front(ticket, back_since) or number_of('served')
  tickets.put(id, ticket)
  redis.call('ZADD', K.lines, 0, member_of(ticket, id))
  redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
  add_to('queued' .. place, 1)
end

local function leave_line(id, ticket)
  local place, tenant_id = ticket.place, ticket.tenant
  local tenant = tenants.need(tenant_id)
  redis.call('ZREM', K.lines, member_of(ticket, id))
  count(tenant, ticket, -1)
  tenants.put(tenant_id, tenant)
  if tenant.count[place] == 0 then
    redis.call('ZREM', standing_key(place), tenant_id)
    if is_fair() then
      set_meta('left' .. place, tenant_id)
    end
  elseif not is_fair() then
    redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
  end
  add_to('queued' .. place, -1)
end

-- Changes the order of all that wait. No tenant was idle, so none is lifted; who left last is remembered.
local function set_order(name)
  set_meta('order', name)
  -- How long requests have waited counts from here, for all alike.
  set_meta('hybrid_since', text(number_of('served')))
  for place = 1, PLACES do
    local firsts = {}
    for _, tenant_id in ipairs(redis.call('ZRANGE', standing_key(place), 0, -1)) do
      local first = tickets.need(first_of(place, tenant_id))
      firsts[#firsts + 1] = {first.front and -first.front or first.arrived_us, first.number, tenant_id}
    end
    table.sort(firsts, function(one, other)
      return one[1] < other[1] or (one[1] == other[1] and one[2] < other[2])
    end)
    for _, first in ipairs(firsts) do
      local tenant_id = first[3]
      local tenant = tenants.need(tenant_id)
      tenant.begun[place] = add_to('begun', 1)
      tenants.put(tenant_id, tenant)
      redis.call('ZADD', standing_key(place), standing(tenant_id, tenant, place), tenant_id)
    end
  end
end
