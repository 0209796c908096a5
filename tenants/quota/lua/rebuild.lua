-- Sets counters from the ledger; what requests hold stays held.
-- ARGV: now_us, number of the attempt, 1 (to repair a store in use: the epoch, 0),
--   then for each limit: name, shape, home, used, amount, start_us, end_us, scale, rate per ms

if ARGV[3] == '1' and not may_rebuild(tonumber(ARGV[2])) or ARGV[3] == '0' and is_lost() then
  return {'lost'}
end
for i = 4, #ARGV, 9 do
  local start_us, end_us = tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6])
  if ARGV[i + 1] == 'w' and end_us > 0 and (now_us < start_us or now_us >= end_us) then
    return {'clock', now_us}
  end
end
for i = 4, #ARGV, 9 do
  local name, shape, home, used = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local counter, cap = load(home, name), tonumber(ARGV[i + 4]) * tonumber(ARGV[i + 7])
  if shape == 'w' then
    if not counter or (counter[2] > 0 and now_us >= counter[2]) then
      if counter then
        keep_window(home, name, counter)
      end
      counter = {tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6]), 0, 0, 0}
    end
    counter[3] = used
    store(home, name, counter)
  elseif shape == 'b' then
    local level = math.max(0, tonumber(ARGV[i + 4]) - used) * tonumber(ARGV[i + 7])
    -- A clock that is behind gives no credit: its time is not used for the bucket.
    local at_ms = math.max(math.floor(now_us / 1000), counter and counter[2] or 0)
    counter = {level, at_ms, counter and counter[3] or 0}
    store(home, name, counter)
  end
  if home ~= '' and home ~= 'p' and shape ~= 'c' then
    local record = find_user(home)
    note_counter(record, name, rest_us(shape, counter, cap, tonumber(ARGV[i + 8])))
    store_user(home, record)
  end
end
return {'rebuilt', now_us}
