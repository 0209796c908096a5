-- Ageing: raises a request's tier with its wait (gateway/flow/ageing.py, RequestQueue.age).

local NEVER = 0

-- When a request of `tier` leaves band `band` for the one above; nil: never. A braked tier does not age.
local function moves_up_s(ticket, band)
  local ageing_s = rule.ageing_s[ticket.tier + 1] * rule.knobs.ageing
  local ages = band > 0 and ageing_s ~= NEVER and not is_braked(ticket.tier)
  return ages and ticket.arrived_us / 1000000 + (ticket.tier - band + 1) * ageing_s or nil
end

local function effective_tier(ticket)
  local band = ticket.tier
  while true do
    local up_s = moves_up_s(ticket, band)
    if not up_s or up_s > now_s then
      return band
    end
    band = band - 1
  end
end

-- Notes when a waiting request moves up next, if it does.
local function watch_ageing(id, ticket)
  local up_s = moves_up_s(ticket, band_of(ticket.place))
  if up_s then
    redis.call('ZADD', K.ages, up_s, id)
  else
    redis.call('ZREM', K.ages, id)
  end
end

-- The knob of ageing has turned: from now on all that wait go by it. What has moved up stays.
local function follow_ageing()
  local factor = string.format('%.17g', rule.knobs.ageing)
  if factor == (meta.ageing or '1') then
    return
  end
  set_meta('ageing', factor)
  for _, id in ipairs(redis.call('HKEYS', K.tickets)) do
    local ticket = tickets.need(id)
    if not ticket.runs then
      watch_ageing(id, ticket)
    end
  end
end

-- A request stands in its band and lane from now on.
local function stand(id, ticket, first, has_aged, back_since)
  tickets.put(id, ticket)
  join_line(id, ticket, first, has_aged, back_since)
  watch_ageing(id, ticket)
end

local function step_out(id, ticket)
  redis.call('ZREM', K.ages, id)
  leave_line(id, ticket)
end

-- All due requests, band by band, by arrival.
local function age()
  local due = redis.call('ZRANGEBYSCORE', K.ages, '-inf', now_s)
  local moves = {}
  for order, id in ipairs(due) do
    local ticket = tickets.need(id)
    moves[order] = {place_of(effective_tier(ticket), lane_of(ticket.place)), ticket.arrived_us, order, id}
  end
  table.sort(moves, function(one, other)
    for i = 1, 3 do
      if one[i] ~= other[i] then
        return one[i] < other[i]
      end
    end
    return false
  end)
  local firsts = {}
  for _, move in ipairs(moves) do
    local place, id = move[1], move[4]
    local ticket = tickets.need(id)
    step_out(id, ticket)
    ticket.place = place
    -- In a single line: the first one before any moved.
    local first = not is_fair() and firsts[place] or head(place)
    stand(id, ticket, first, true)
    firsts[place] = first or id
  end
end
