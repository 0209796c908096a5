-- Adds to a live hold, on the limits it was reserved on, or to none of them.
-- ARGV: now_us, request id, then the amount for each meter number

local packed = redis.call('HGET', keys.holds, ARGV[2])
if not packed then
  return {'gone'}
end
local hold = cmsgpack.unpack(packed)
local found, raws, current, refused = {}, {}, {}, false
for i, held in ipairs(hold.on) do
  local counter, name = locate(keys, held)
  if held.shape == 'b' and counter then
    counter = advance_bucket(held, counter, now_us)
  end
  local more = tonumber(ARGV[2 + held.meter])
  -- What is forgotten (a window that is over and held nothing) has no room.
  if held.hard and more > (counter and math.max(0, room(held, counter)) or 0) then
    refused = true
  end
  found[i] = {name, counter, more}
  raws[i] = redis.call('HGET', keys.counters, name) or ''
  current[i] = redis.call('HGET', keys.counters, held.name) or ''
end
if refused then
  return {'denied', text(now_us), hold.limits, raws, current}
end
for i, held in ipairs(hold.on) do
  local name, counter, more = found[i][1], found[i][2], found[i][3]
  if counter then
    add_held(counter, more)
    store_located(keys, held, name, counter)
  end
  held.wanted = held.wanted + more
end
redis.call('HSET', keys.holds, ARGV[2], cmsgpack.pack(hold))
return granted(keys, hold, now_us)
