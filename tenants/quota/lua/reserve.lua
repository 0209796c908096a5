-- Holds a request's amounts on every limit, or on none.
-- ARGV: now_us, request id, lease_us, 1 if this tenant must be known, limits as text, then for each limit:
--   name, shape, hard, meter, wanted, amount, start_us, end_us, scale, rate per ms

local request_id = ARGV[2]
if ARGV[4] == '1' and redis.call('HEXISTS', keys.counters, READY) == 0 then
  return {'lost'}
end
local existing = redis.call('HGET', keys.holds, request_id)
if existing then
  return granted(keys, cmsgpack.unpack(existing), now_us)
end

local hold, found, raws, refused = {limits = ARGV[5], on = {}}, {}, {}, false
for i = 6, #ARGV, 10 do
  local limit = {
    name = ARGV[i], shape = ARGV[i + 1], hard = ARGV[i + 2] == '1', meter = tonumber(ARGV[i + 3]),
    wanted = tonumber(ARGV[i + 4]), amount = tonumber(ARGV[i + 5]), start = 0,
    scale = tonumber(ARGV[i + 8]), rate = tonumber(ARGV[i + 9]),
  }
  local raw = redis.call('HGET', keys.counters, limit.name)
  local counter = parse(raw)
  if limit.shape == 'w' then
    if not counter or (counter[2] > 0 and now_us >= counter[2]) then
      -- A new window. Calendars are the caller's business; its clock must agree with ours on which one.
      local start_us, end_us = tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])
      if end_us > 0 and (now_us < start_us or now_us >= end_us) then
        return {'clock', text(now_us)}
      end
      limit.over = counter
      counter = {start_us, end_us, 0, 0}
    end
    limit.start = counter[1]
  elseif limit.shape == 'b' then
    counter = advance_bucket(limit, counter, now_us)
  elseif not counter then
    counter = {0}
  end
  if limit.hard and limit.wanted > math.max(0, room(limit, counter)) then
    refused = true
  end
  raws[#raws + 1] = raw or ''
  found[#found + 1] = counter
  hold.on[#hold.on + 1] = limit
end
if refused then
  return {'denied', text(now_us), raws}
end

redis.call('HSET', keys.counters, READY, '1')
for i, limit in ipairs(hold.on) do
  if limit.over then
    keep_window(keys, limit.name, limit.over)
    limit.over = nil
  end
  add_held(found[i], limit.wanted)
  store(keys.counters, limit.name, found[i])
end
redis.call('HSET', keys.holds, request_id, cmsgpack.pack(hold))
redis.call('ZADD', keys.leases, text(now_us + tonumber(ARGV[3])), request_id)
return granted(keys, hold, now_us)
