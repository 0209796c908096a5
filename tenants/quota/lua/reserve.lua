-- Holds a request's amounts on every limit, or on none.
-- ARGV: now_us, epoch, request id, lease_us, limits as text, ahead by meter, then for each limit:
--   name, shape, mode, meter, exact, first, ahead, most, amount, start_us, end_us, scale, rate per ms, lowest

if is_lost() then
  return {'lost'}
end
local request_id = ARGV[3]
local existing = find_hold(request_id)
if existing then
  return granted(existing, {})
end

local hold = {limits = ARGV[5], ahead = by_meter(6), on = {}}
local found, over, raws, wishes, would_deny, refused = {}, {}, {}, {}, {}, false
for i = 6 + METERS, #ARGV, COLUMNS do
  local part = read_part(i)
  local wish = {first = tonumber(ARGV[i + 5]), ahead = tonumber(ARGV[i + 6]), most = tonumber(ARGV[i + 7])}
  local raw = redis.call('HGET', keys.counters, part.name)
  local counter = parse(raw)
  local index = #hold.on + 1
  if part.shape == 'w' then
    if not counter or (counter[2] > 0 and now_us >= counter[2]) then
      -- A new window. The caller computes its bounds; its clock must agree with the server's on which one it is.
      local start_us, end_us = tonumber(ARGV[i + 9]), tonumber(ARGV[i + 10])
      if end_us > 0 and (now_us < start_us or now_us >= end_us) then
        return {'clock', now_us}
      end
      over[index] = counter
      counter = {start_us, end_us, 0, 0, 0}
    end
    part.start = counter[1]
  elseif part.shape == 'b' then
    counter = advance_bucket(part, counter, now_us)
  elseif not counter then
    counter = {0}
  end
  if is_short(counter, part, wish.first, wish.most) then
    if part.mode == HARD then
      refused = true
    elseif part.mode == SHADOW then
      would_deny[#would_deny + 1] = index
    end
  end
  raws[index], found[index], wishes[index], hold.on[index] = raw or '', counter, wish, part
end
if refused then
  return {'denied', now_us, raws}
end

for i, part in ipairs(hold.on) do
  if over[i] then
    keep_window(part.name, over[i])
  end
  reach(found[i], part, wishes[i].ahead, wishes[i].most)
  store(keys.counters, part.name, found[i])
end
store_hold(request_id, hold)
redis.call('ZADD', keys.leases, text(now_us + tonumber(ARGV[4])), request_id)
return granted(hold, would_deny)
